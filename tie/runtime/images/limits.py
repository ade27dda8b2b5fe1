"""How large an image may be. Everything is checked against what a file says of itself before a pixel has memory."""

from dataclasses import dataclass

from tie.runtime.images.refusals import ImageRefusedError, Refusal


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one image.

    Attributes:
        file_bytes: of its file.
        pixels: width times height.
        side: the longer of both; the JPEG decoder's own limit is 16,384.
        scans: of a progressive JPEG, each of which passes over all pixels.
        cpu_s: of the processor.
        wall_s: until the answer, on a machine that is busy with other things.
        memory_bytes: address space of the process that decodes, beyond what it has before.
    """

    file_bytes: int = 8 * 1024 * 1024
    pixels: int = 16 * 1024 * 1024
    side: int = 16_384
    scans: int = 64
    cpu_s: float = 4.0
    wall_s: float = 15.0
    memory_bytes: int = 768 * 1024 * 1024

    def check_size(self, width: int, height: int) -> None:
        """Checks the size that a header states.

        Raises:
            ImageRefusedError: no pixels, too many, or too many in a row.
        """
        if width < 1 or height < 1:
            raise ImageRefusedError(Refusal.CORRUPT)
        if max(width, height) > self.side:
            raise ImageRefusedError(Refusal.TOO_LONG_A_SIDE)
        if width * height > self.pixels:
            raise ImageRefusedError(Refusal.TOO_MANY_PIXELS)
