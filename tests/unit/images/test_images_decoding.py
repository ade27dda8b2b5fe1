"""What becomes of every kind of file, measured against Pillow; and what a bomb costs."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from image_corpus import bombs, cases, photograph, saved
from tie.runtime.images.decoding import decode
from tie.runtime.images.exif import orientation
from tie.runtime.images.limits import Limits
from tie.runtime.images.refusals import ImageRefusedError, Refusal

HELPERS = Path(__file__).parents[2] / "helpers"
IDLE_AND_BOMBS = """
import resource, sys
from image_corpus import bombs
from tie.runtime.images.decoding import decode
from tie.runtime.images.limits import Limits
from tie.runtime.images.refusals import ImageRefusedError
everything = list(bombs())
decode(everything[4].data, Limits())
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for case in everything:
    try:
        decode(case.data, Limits())
    except ImageRefusedError:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle)
"""


def as_pillow_does(data: bytes) -> np.ndarray:
    """On white, upright, of 16 bits the upper 8."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode.startswith("I"):
        values = np.asarray(image)
        key = image.info.get("transparency")
        grey = Image.fromarray((values >> 8).astype(np.uint8))
        image = (
            grey
            if key is None
            else Image.merge("LA", (grey, Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))))
        )
    image = image.convert("RGBA")
    return np.asarray(Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB"))


def outcome(data: bytes, limits: Limits | None = None) -> np.ndarray | Refusal:
    try:
        return decode(data, limits or Limits())
    except ImageRefusedError as error:
        return error.refusal


def test_every_file_is_decoded_as_pillow_does_or_refused_with_its_code(monkeypatch):
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_CHUNK", 1 << 30)  # Pillow reads texts; ours never sees them
    count = 0
    for case in cases():
        count += 1
        got = outcome(case.data)
        if case.refusal:
            assert got is case.refusal, (case.name, got)
            continue
        assert isinstance(got, np.ndarray), (case.name, got)
        wanted = as_pillow_does(case.data)
        assert got.shape == wanted.shape, case.name
        assert np.abs(got.astype(int) - wanted).mean() <= 2, case.name
        assert got.dtype == np.uint8, case.name
        assert got.flags.c_contiguous, case.name
    assert count >= 300


def test_names_of_cases_are_unique_and_every_refusal_of_a_file_is_among_them():
    everything = list(cases())
    assert len({case.name for case in everything}) == len(everything)
    by_process = {Refusal.TOO_SLOW, Refusal.DECODER_DIED, Refusal.FILE_TOO_LARGE}
    assert {case.refusal for case in everything} == {None, *Refusal} - by_process


def test_a_bomb_takes_no_memory():
    done = subprocess.run(
        [sys.executable, "-c", IDLE_AND_BOMBS], env={"PYTHONPATH": str(HELPERS)}, capture_output=True, text=True,
        check=True, timeout=120,
    )  # fmt: skip
    assert int(done.stdout) <= 64 * 1024
    assert len(list(bombs())) >= 12


def test_transparency_of_grey_with_few_bits_goes_by_the_stored_value():
    """Not compared with Pillow, which scales the values and not the key."""
    from image_corpus import chunk, png

    picture = decode(png(4, 1, 2, 0, b"\0\x1b", extra=chunk(b"tRNS", b"\0\1")), Limits())
    assert picture[0, :, 0].tolist() == [0, 255, 170, 255]


@pytest.mark.parametrize(
    ("limits", "refusal"),
    [
        (Limits(file_bytes=100), Refusal.FILE_TOO_LARGE),
        (Limits(pixels=63 * 64), Refusal.TOO_MANY_PIXELS),
        (Limits(side=63), Refusal.TOO_LONG_A_SIDE),
        (Limits(scans=1), Refusal.TOO_MANY_SCANS),
    ],
)
def test_limits_are_what_is_configured(limits, refusal):
    assert outcome(saved(photograph(64, 64), "JPEG", progressive=True), limits) is refusal
    assert isinstance(outcome(saved(photograph(64, 64), "JPEG", progressive=True)), np.ndarray)


@pytest.mark.parametrize(
    "tiff", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff" + bytes(9), b"XX" + bytes(40)]
)
def test_exif_that_cannot_be_read_says_upright(tiff):
    assert orientation(tiff) == 1


def test_a_refusal_says_what_to_do_and_nothing_of_the_file():
    for refusal in Refusal:
        assert refusal.text
        assert refusal.code == refusal.code.lower()
    with pytest.raises(ImageRefusedError) as caught:
        decode(b"\x89PNG\r\n\x1a\nsecret secret secret secret secret", Limits())
    assert "secret" not in str(caught.value)
