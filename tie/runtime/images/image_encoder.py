"""Images to vectors, off the step thread: decoded in processes of their own, encoded together on one thread.

Squares of different requests share passes of the encoder, a few at a time, so that a large image does not keep a small
one waiting for long. The thread is nice: tokens of those who are already served go first.
"""

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from tie.bones.arena import Bytes
from tie.bones.batch import Floats
from tie.daemon import log
from tie.proto import runtime_pb2
from tie.runtime.images.decoders import Decoders, DecodersBusyError
from tie.runtime.images.embeddings import ImageEmbeddings
from tie.runtime.images.orders import Prepared
from tie.runtime.images.refusals import ImageRefusedError, Refusal
from tie.runtime.request import RequestRefusedError

_TOGETHER: Final = 4  # squares in a pass
_NICENESS: Final = 10
_ROOM_BYTES: Final = 256 * 1024 * 1024  # of pixels that wait for the encoder, at most
_END_S: Final = 10.0


@dataclass(slots=True)
class Counts:
    """What was done so far.

    Attributes:
        decoded: images.
        refused: images, by code.
        squares: that were encoded.
        passes: of the encoder.
    """

    decoded: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    squares: int = 0
    passes: int = 0


@dataclass(eq=False, slots=True)
class _Look:
    """One request's images on their way."""

    future: "Future[tuple[ImageEmbeddings, ...]]"
    prepared: list[Prepared | None]
    left: int  # images that are being decoded
    room: int  # bytes that are kept for it
    vectors: list[Floats] = field(default_factory=list)
    done: int = 0  # squares that have been encoded

    @property
    def squares(self) -> list[Bytes]:
        return [tile for one in self.prepared if one for tile in one.tiles]

    def settle(self, error: BaseException | None) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled, or refused for another of its images
            if error:
                self.future.set_exception(error)
                return
            flat, at = np.concatenate(self.vectors), 0
            seen = []
            for one in self.prepared:
                assert one is not None  # noqa: S101 (all of them are, or there had been an error)
                vectors = flat[at : at + len(one.tiles)]
                at += len(one.tiles)
                seen.append(ImageEmbeddings(one.rows, one.columns, vectors.reshape(-1, vectors.shape[-1])))
            self.future.set_result(tuple(seen))


class ImageEncoder:
    """Looks at images. For any thread.

    Args:
        decoders: make squares of them.
        encode: `[n, side, side, 3]` to `[n, tokens, hidden_size]`; only this object's thread calls it.
        image_bytes: of the pixels of the largest image, prepared.
    """

    def __init__(self, decoders: Decoders, encode: Callable[[Bytes], Floats], image_bytes: int) -> None:
        self._decoders = decoders
        self._encode = encode
        self._image_bytes = image_bytes
        self._lock = threading.Lock()
        self._reserved = 0
        self._waiting: queue.SimpleQueue[_Look | None] = queue.SimpleQueue()
        self.counts = Counts()
        self._thread = threading.Thread(target=self._run, name="vision-encoder", daemon=True)
        self._thread.start()

    def look(self, images: Sequence[bytes], numbers: Sequence[int] = ()) -> "Future[tuple[ImageEmbeddings, ...]]":
        """Starts on a request's images, at least one. Cancel the future when nobody wants to know any more.

        Args:
            images: their files.
            numbers: which of the request's they are; by default all.

        The future raises RequestRefusedError: one is not decoded, or too many are under way.
        """
        look = _Look(Future(), [None] * len(images), len(images), self._image_bytes * len(images))
        with self._lock:
            full = self._reserved and self._reserved + look.room > _ROOM_BYTES
            if not full:
                self._reserved += look.room
        if full:
            look.future.set_exception(_busy("too many are under way"))
            return look.future
        for position, data in enumerate(images):
            number = numbers[position] if numbers else position
            self._decoders.decode(data).add_done_callback(partial(self._decoded, look, position, number))
        return look.future

    def close(self) -> None:
        """Ends thread and processes; what is under way is dropped."""
        self._decoders.close()
        self._waiting.put(None)
        self._thread.join(_END_S)

    def _decoded(self, look: _Look, position: int, number: int, image: "Future[Prepared]") -> None:
        error = None if image.cancelled() else image.exception()
        with self._lock:
            if image.cancelled():
                error = _busy("the runtime is ending")
            elif error is None:
                look.prepared[position] = image.result()
                self.counts.decoded += 1
            elif isinstance(error, ImageRefusedError):
                code = error.refusal.code
                self.counts.refused[code] = self.counts.refused.get(code, 0) + 1
                error = _refused(number, error.refusal)
            elif isinstance(error, DecodersBusyError):
                error = _busy(str(error))
            look.left -= 1
            complete = look.left == 0
        if error:
            look.settle(error)
        if complete:
            self._waiting.put(look)

    # --- the encoder's thread ---

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # where it may be said
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        looks: deque[_Look] = deque()
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    look = self._waiting.get(block=not looks)
                    if look is None:
                        return
                    looks.append(look)
            self._pass(looks)

    def _pass(self, looks: "deque[_Look]") -> None:
        """Encodes a few squares of those who wait, in turn; whoever has all of them leaves."""
        for look in [one for one in looks if one.future.done()]:
            self._leave(looks, look)
        shares: list[tuple[_Look, list[Bytes]]] = []
        room = _TOGETHER
        for look in looks:
            some = look.squares[look.done : look.done + max(1, _TOGETHER // len(looks))][:room]
            if some:
                shares.append((look, some))
                room -= len(some)
        if not shares:
            return
        try:
            vectors = self._encode(np.stack([square for _, some in shares for square in some]))
        except Exception as error:  # noqa: BLE001 (these requests fail, and nobody else's)
            log.failure("images.encoder-failed", error)
            for look, _ in shares:
                look.settle(error)
            return
        at = 0
        for look, some in shares:
            look.vectors.append(vectors[at : at + len(some)])
            look.done += len(some)
            at += len(some)
            if look.done == len(look.squares):
                look.settle(None)
        self.counts.squares += at
        self.counts.passes += 1
        looks.rotate(-1)  # whoever was left out comes first

    def _leave(self, looks: "deque[_Look]", look: _Look) -> None:
        looks.remove(look)
        with self._lock:
            self._reserved -= look.room


def _refused(number: int, refusal: Refusal) -> RequestRefusedError:
    return RequestRefusedError(runtime_pb2.CODE_IMAGE, f"images[{number}]: {refusal.code}: {refusal.text}")


def _busy(why: str) -> RequestRefusedError:
    return RequestRefusedError(runtime_pb2.CODE_BUSY, f"images: {why}")
