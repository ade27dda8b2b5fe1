"""The probe's side of the engine's two sockets: engine.sock (questions) and kv.sock (who it is, its death notice)."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvxfer import errors as kvxfer_errors
from kvxfer.channel import Channel
from tie.daemon.errors import PeerDiedError, PeerError, PeerTimeoutError, ProtocolError
from tie.daemon.frames import parse
from tie.proto import engine_pb2, runtime_pb2

_CONNECT_S: Final = 1.0


async def ask(path: Path, request: engine_pb2.EngineRequest, *, timeout: float) -> engine_pb2.EngineReply:
    """One question on a connection of its own.

    Raises:
        PeerDiedError: no engine there, or it went away.
        PeerTimeoutError: no answer within `timeout` seconds.
        ProtocolError: the answer is none.
    """
    return await asyncio.to_thread(_ask, path, request, timeout)


def _ask(path: Path, request: engine_pb2.EngineRequest, timeout: float) -> engine_pb2.EngineReply:
    try:
        with Channel.connect(path, timeout=_CONNECT_S) as channel:
            channel.send(request.SerializeToString(), timeout=_CONNECT_S)
            return parse(_message(channel, timeout), engine_pb2.EngineReply)
    except kvxfer_errors.KvxferError as error:
        raise _translated(error) from None


class DeathNotice:
    """A connection to kv.sock: `hello` says whose, `on_death` is called (on the event loop) when it ends."""

    def __init__(self, channel: Channel, hello: runtime_pb2.KvHello) -> None:
        self._channel = channel
        self.hello = hello

    @classmethod
    async def connect(cls, path: Path, *, timeout: float) -> "DeathNotice":
        """Connects and waits for the hello.

        Raises:
            PeerError: no engine there yet, or not one that speaks our protocol.
        """
        return await asyncio.to_thread(cls._connect, path, timeout)

    @classmethod
    def _connect(cls, path: Path, timeout: float) -> "DeathNotice":
        try:
            channel = Channel.connect(path, timeout=_CONNECT_S)
            try:
                return cls(channel, parse(_message(channel, timeout), runtime_pb2.KvHello))
            except BaseException:
                channel.close()
                raise
        except kvxfer_errors.KvxferError as error:
            raise _translated(error) from None

    def watch(self, on_death: Callable[[], None]) -> None:
        """Calls `on_death` once, when the connection ends. The engine says nothing after its hello."""
        loop = asyncio.get_running_loop()

        def readable() -> None:
            loop.remove_reader(self._channel.fileno())
            on_death()

        loop.add_reader(self._channel.fileno(), readable)

    def close(self) -> None:
        """Gives the connection up."""
        if self._channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()


def _message(channel: Channel, timeout: float) -> bytes:
    message, descriptors = channel.receive(timeout=timeout)
    for descriptor in descriptors:
        os.close(descriptor)
    return message


def _translated(error: kvxfer_errors.KvxferError) -> PeerError:
    if isinstance(error, kvxfer_errors.PeerTimeoutError):
        return PeerTimeoutError("the engine does not answer")
    if isinstance(error, kvxfer_errors.PeerDiedError):
        return PeerDiedError("the engine is not there")
    return ProtocolError("the engine's message is none")
