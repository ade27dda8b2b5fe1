"""The runtime's side of `decoder_process`: gives images away and checks what comes back.

However many images come at once, there are `workers` at a time and `_MOST_WAITING` that wait; each wait has a deadline.
"""

import contextlib
import queue
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from tie.daemon import log
from tie.runtime.helper_process import HelperProcess
from tie.runtime.images.limits import Limits
from tie.runtime.images.orders import GOOD, LENGTH, REPLY, Orders, Preparation, Prepared
from tie.runtime.images.refusals import ImageRefusedError, Refusal

_GRACE_S: Final = 2.0  # for the process itself, beyond the timers of its forks
_MOST_WAITING: Final = 32
# What computes in these libraries does so in one thread; theirs would only be in the way of a fork.
_ALONE: Final = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


class DecodersBusyError(Exception):
    """Not the image's fault: it may be tried again."""


class Decoders:
    """Decodes images on threads of its own. For any thread.

    Args:
        limits: of one image.
        preparation: how the model wants its pictures.
        workers: images at a time.
    """

    def __init__(self, limits: Limits, preparation: Preparation, *, workers: int = 2) -> None:
        self._limits = limits
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="image")
        self._slots = threading.BoundedSemaphore(workers + _MOST_WAITING)
        self._processes = [_Process(Orders(limits, preparation)) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        for _ in self._processes:
            self._workers.submit(self._warm)

    def decode(self, data: bytes) -> "Future[Prepared]":
        """Starts on an image. The future raises ImageRefusedError, or DecodersBusyError where it cannot begin."""
        refused: Future[Prepared] = Future()
        if len(data) > self._limits.file_bytes:
            refused.set_exception(ImageRefusedError(Refusal.FILE_TOO_LARGE))
            return refused
        if not self._slots.acquire(blocking=False):
            refused.set_exception(DecodersBusyError("too many images are being decoded"))
            return refused
        future = self._workers.submit(self._decode, data)
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def close(self) -> None:
        """Ends the threads and processes; images are dropped, also those that are being decoded."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.helper.kill()
        self._workers.shutdown(wait=True)
        for process in self._processes:
            process.helper.close()

    def _warm(self) -> None:
        """Starts a process, so that the first image does not wait for it."""
        process = self._idle.get()
        try:
            process.helper.start()
        except OSError as error:
            log.failure("images.no-decoder", error)  # tried again with the first image
        finally:
            self._idle.put(process)

    def _decode(self, data: bytes) -> Prepared:
        process = self._idle.get()
        try:
            return process.decode(data)
        except OSError as error:
            log.failure("images.no-decoder", error)
            raise DecodersBusyError("images cannot be decoded now") from None
        finally:
            self._idle.put(process)


class _Process:
    """One `decoder_process`, started when it is first needed and again whenever it fails. Of one thread at a time."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self.helper = HelperProcess("tie.runtime.images.decoder_process", orders.frame(), _ALONE)

    def decode(self, data: bytes) -> Prepared:
        """Decodes and prepares one image.

        Raises:
            ImageRefusedError: it is not decoded.
            OSError: there is no process to be had.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            limit = self._orders.limits.wall_s + _GRACE_S
            ours.settimeout(limit)
            prepared, refusal = None, Refusal.DECODER_DIED
            # A decoder that is gone does not listen, or says too little; its process says why.
            with contextlib.suppress(OSError):
                ours.sendall(LENGTH.pack(len(data)) + data)
                prepared, refusal = self._reply(ours)
        ended = self.helper.answer(timeout=limit)
        if ended != GOOD and ended not in set(Refusal):
            self.helper.close()
            raise BrokenPipeError
        if ended != GOOD:
            raise ImageRefusedError(Refusal(ended))
        if prepared is None:
            raise ImageRefusedError(refusal)
        return prepared

    def _hand_over(self, connection: socket.socket) -> None:
        try:
            self._send(connection)
        except ConnectionError:
            # No image can end the process itself, which only forks: somebody did, and the next one answers.
            self._send(connection)

    def _send(self, connection: socket.socket) -> None:
        self.helper.start()
        self.helper.send(b"\0", [connection.fileno()], timeout=_GRACE_S)

    def _reply(self, connection: socket.socket) -> tuple[Prepared | None, Refusal]:
        """What one image's decoder says. It has seen hostile bytes: nothing of this is believed."""
        head = _exactly(connection, REPLY.size)
        status, rows, columns, count = REPLY.unpack(head)
        if status != GOOD:
            return None, Refusal(status) if status in set(Refusal) else Refusal.DECODER_DIED
        how = self._orders.preparation
        whole = rows == columns == 0 and count == 1
        if not (whole or (how.split and rows and columns and rows * columns + 1 == count <= how.most_tiles)):
            return None, Refusal.DECODER_DIED
        data = _exactly(connection, count * how.side * how.side * 3)
        tiles = np.frombuffer(data, dtype=np.uint8).reshape(count, how.side, how.side, 3)
        return Prepared(tiles, rows, columns), Refusal.DECODER_DIED


def _exactly(connection: socket.socket, count: int) -> bytearray:
    """So many bytes.

    Raises:
        OSError: there are fewer, or they do not come in time.
    """
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise BrokenPipeError
        view = view[received:]
    return data
