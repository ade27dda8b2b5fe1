"""A process that decodes images, each in a fork of its own: `python -m tie.runtime.images.decoder_process`.

Decoders meet whatever anybody sends. Ours are memory-safe, but a library may still abort, loop or take all memory; so
each image is decoded and resized in a fork that has seen no other and ends with it. It has one descriptor, the image's
own, and can get no further one: no file, no socket, no other request's image. The kernel ends it by a timer, and
refuses it memory beyond a bound. What comes of that is one refused image.

On standard input comes a frame (4-byte big-endian length, JSON: `Orders`), and then one byte with one descriptor for
each image: a stream socket on which the image comes as a frame and its pixels go back (`decoders` reads them). On
standard output goes a byte for the orders, and one at the end of each fork: how it ended. End of file ends the process.
"""

import contextlib
import os
import resource
import signal
import socket
from typing import Final, NoReturn

import numpy as np

from tie.daemon.hardening import die_with_parent, protect_process
from tie.runtime.images.decoding import decode
from tie.runtime.images.orders import GOOD, LENGTH, REPLY, Orders
from tie.runtime.images.preparing import prepare
from tie.runtime.images.refusals import ImageRefusedError, Refusal

_NICENESS: Final = 5  # tokens for those who are already served go first
_STDIN, _STDOUT = 0, 1
_TIMERS: Final = {signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU}


def main() -> None:
    """Serves one parent until it is gone."""
    die_with_parent(signal.SIGKILL)
    protect_process()
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(_NICENESS)
    with socket.socket(fileno=os.dup(_STDIN)) as control:
        orders = Orders.read(_frame(control))
        # Once before there is an image: a fork can open no file, and some parts are loaded when first used.
        prepare(np.zeros((2, 3, 3), dtype=np.uint8), orders.preparation)
        os.write(_STDOUT, bytes([GOOD]))
        while True:
            said, descriptors, *_ = socket.recv_fds(control, 1, 1)
            if not said or len(descriptors) != 1:
                return
            os.write(_STDOUT, bytes([_in_a_fork(orders, descriptors[0])]))


def _in_a_fork(orders: Orders, descriptor: int) -> int:
    """Decodes one image; 0, or the refusal that an early end stands for."""
    child = os.fork()
    if child == 0:
        _decode_one(orders, descriptor)
    os.close(descriptor)
    _, status = os.waitpid(child, 0)
    if status == 0:
        return GOOD
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _TIMERS:
        return Refusal.TOO_SLOW
    return Refusal.DECODER_DIED


def _decode_one(orders: Orders, descriptor: int) -> NoReturn:
    """Reads an image, answers, and is gone; or is gone without an answer."""
    status = 1
    try:
        die_with_parent(signal.SIGKILL)
        limits = orders.limits
        # Both end the process, as nobody handles them: of its own work, and of the time that passes.
        signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        with socket.socket(fileno=_alone(descriptor)) as connection:
            _confine(limits.memory_bytes)
            connection.sendall(_answer(_frame(connection), orders))
        status = 0
    finally:
        os._exit(status)


def _alone(descriptor: int) -> int:
    """Closes every other descriptor; the image's gets the number 0."""
    os.dup2(descriptor, _STDIN)
    os.closerange(1, max(os.sysconf("SC_OPEN_MAX"), 1024))
    return _STDIN


def _confine(memory_bytes: int) -> None:
    """No further descriptor, no file that grows, no process; and no memory beyond a bound."""
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 (while there still may be descriptors)
        pages = int(file.read().split()[0])
    bounds = {
        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGESIZE") + memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,
    }
    for bound, most in bounds.items():
        resource.setrlimit(bound, (most, most))


def _answer(data: bytes, orders: Orders) -> bytes:
    try:
        prepared = prepare(decode(data, orders.limits), orders.preparation)
    except ImageRefusedError as error:
        return REPLY.pack(error.refusal, 0, 0, 0)
    except MemoryError:
        return REPLY.pack(Refusal.TOO_MANY_PIXELS, 0, 0, 0)
    head = REPLY.pack(GOOD, prepared.rows, prepared.columns, len(prepared.tiles))
    return head + prepared.tiles.tobytes()


def _frame(connection: socket.socket) -> bytes:
    """The next frame; empty at the end of the file."""
    head = _read(connection, LENGTH.size)
    return _read(connection, LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def _read(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            break
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    main()
