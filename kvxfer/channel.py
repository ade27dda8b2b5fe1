"""A SOCK_SEQPACKET channel: whole messages, with file descriptors (SCM_RIGHTS, unix(7)), and a death notice.

The kernel keeps message borders, so there is no parser; end-of-file is the death notice. Blocking, with a deadline on
every wait; asyncio callers use `fileno()` with `loop.add_reader`, or a thread.
"""

import array
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvxfer.errors import ChannelError, PeerDiedError, PeerTimeoutError

MAX_MESSAGE = 64 * 1024
MAX_DESCRIPTORS = 8
_UCRED = struct.Struct("3i")
_INT_BYTES = array.array("i").itemsize


class Channel:
    """One end of a connection. Not for several threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX or connection.type != socket.SOCK_SEQPACKET:
            raise ChannelError("a channel is an AF_UNIX SOCK_SEQPACKET socket")
        self._socket = connection

    @classmethod
    def connect(cls, path: Path, *, timeout: float) -> Self:
        """Connects to the listener on `path`.

        Raises:
            PeerDiedError: nobody listens there.
            PeerTimeoutError: the listener's queue stayed full.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            # A non-blocking connect fails at once where the queue is full; a blocking one waits as a send would.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))
            connection.connect(os.fspath(path))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
        except BlockingIOError:
            connection.close()
            raise PeerTimeoutError("nobody accepted the connection") from None
        except OSError as error:
            connection.close()
            raise PeerDiedError(f"cannot connect: {error.strerror}") from None
        return cls(connection)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Two connected ends. One may be passed to another process, as a descriptor, over another channel."""
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(first), cls(second)

    @classmethod
    def adopt(cls, descriptor: int) -> Self:
        """The channel that a descriptor from another process is; it belongs to the channel from here on.

        Raises:
            ChannelError: it is none; it has been closed.
        """
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            raise ChannelError("not a socket") from None
        try:
            return cls(connection)
        except ChannelError:
            connection.close()
            raise

    def fileno(self) -> int:
        """The socket's descriptor, for select, epoll or an event loop."""
        return self._socket.fileno()

    def peer(self) -> tuple[int, int, int]:
        """(pid, uid, gid) of the other end as the kernel recorded them at connect (SO_PEERCRED)."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, gid = _UCRED.unpack(raw)
        return pid, uid, gid

    def send(self, message: bytes, descriptors: Sequence[int] = (), *, timeout: float) -> None:
        """Sends one message, with descriptors (the caller keeps and closes its own).

        Raises:
            ChannelError: the message or the list of descriptors is too large.
            PeerDiedError: the other end is gone.
            PeerTimeoutError: the other end does not read.
        """
        if len(message) > MAX_MESSAGE or len(descriptors) > MAX_DESCRIPTORS or not message:
            raise ChannelError("message empty or too large")
        self._socket.settimeout(timeout)
        try:
            # Not socket.send_fds and recv_fds: those of CPython 3.11 drop their flags.
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            self._socket.sendmsg([message], rights, socket.MSG_NOSIGNAL)
        except (TimeoutError, BlockingIOError):
            raise PeerTimeoutError("the other end does not read") from None
        except OSError as error:
            raise PeerDiedError(f"cannot send: {error.strerror}") from None

    def receive(self, *, timeout: float) -> tuple[bytes, list[int]]:
        """One message and its descriptors, which now belong to the caller (close-on-exec).

        Raises:
            PeerDiedError: the other end is gone.
            PeerTimeoutError: nothing came within `timeout` seconds.
            ChannelError: the message was longer than allowed; its descriptors were closed.
        """
        self._socket.settimeout(timeout)
        try:
            message, control, flags, _ = self._socket.recvmsg(
                MAX_MESSAGE, socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
            )
        except (TimeoutError, BlockingIOError):
            raise PeerTimeoutError("no message within the deadline") from None
        except OSError as error:
            raise PeerDiedError(f"cannot receive: {error.strerror}") from None
        descriptors = _descriptors(control)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelError("message or descriptors cut off")
        if not message:
            raise PeerDiedError("the other end closed the channel")
        return message, descriptors

    def close(self) -> None:
        """Ends the connection: the other end sees end-of-file."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen(path: Path, *, backlog: int = 128, mode: int = 0o660) -> socket.socket:
    """A listening socket on `path`, mode `mode` from its first moment. The caller guards the path (one live server)."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(os.fspath(path))
    finally:
        os.umask(before)
    listener.listen(backlog)
    return listener


def _descriptors(control: Sequence[tuple[int, int, bytes]]) -> list[int]:
    received = array.array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(data[: len(data) - len(data) % _INT_BYTES])
    return received.tolist()


def _timeval(seconds: float) -> bytes:
    """`struct timeval`; zero means for ever, so a shorter time than its unit is one unit."""
    micros = max(1, int(seconds * 1_000_000)) if seconds else 0
    return struct.pack("@ll", *divmod(micros, 1_000_000))
