"""The app's connection to the runtime: Triton for requests, kv.sock for its death notice.

Triton never tells a client that its backend died, so the end of the kv.sock connection does.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvxfer.channel import Channel
from kvxfer.errors import ChannelError, KvxferError, PeerTimeoutError
from tie.app.outcome import RefusalError
from tie.assets.manifest import Manifest
from tie.daemon import log
from tie.daemon.config import NodeConfig
from tie.daemon.errors import ProtocolError
from tie.daemon.frames import parse
from tie.daemon.triton import TritonClient
from tie.proto import app_pb2, runtime_pb2

if TYPE_CHECKING:
    from tie.warden.manifest import CacheFormat


class RuntimeLink:
    """A live runtime.

    Attributes:
        triton: where requests go. No stream is open until one is made.
    """

    def __init__(self, channel: Channel, hello: runtime_pb2.KvHello, triton: TritonClient) -> None:
        self.triton = triton
        self._hello = hello
        self._channel = channel
        self._gone = asyncio.Event()
        self._asked: asyncio.Future[tuple[bytes, list[int]]] | None = None
        asyncio.get_running_loop().add_reader(channel.fileno(), self._on_readable)

    def check_serves(self, manifest: Manifest) -> None:
        """Checks that the runtime runs the bundle whose tokenizer this process has loaded.

        Raises:
            RefusalError: RUNTIME_UNAVAILABLE.
        """
        if (self._hello.model, self._hello.release) != (manifest.model, manifest.release):
            log.event("app.other-release", model=self._hello.model, release=self._hello.release)
            raise unavailable()

    @property
    def format(self) -> "CacheFormat":
        """What the runtime's KV blocks are."""
        from tie.warden.manifest import CacheFormat  # with the cryptography library, for whoever caches

        hello = self._hello
        return CacheFormat(hello.model, hello.release, hello.layout_id, hello.block_tokens, hello.block_bytes)

    async def ask(self, request: runtime_pb2.KvRequest, descriptors: int) -> tuple[bytes, list[int]]:
        """Asks for a transfer; its ticket and the descriptors, which are the caller's, or an empty ticket: refused.

        Raises:
            KvxferError: the runtime is gone, or answers something else.
        """
        self._asked = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(request.SerializeToString(), timeout=0)
            message, received = await self._asked
        finally:
            self._asked = None
        try:
            reply = parse(message, runtime_pb2.KvReply)
            agreed = len(received) == (descriptors if reply.ticket else 0)
        except ProtocolError:
            agreed = False
        if not agreed:
            _close(received)
            raise ChannelError("the runtime's reply is none")
        return reply.ticket, received

    async def watch(self) -> None:
        """Returns never: raises as soon as the runtime is gone.

        Raises:
            RefusalError: RUNTIME_UNAVAILABLE.
        """
        await self._gone.wait()
        raise unavailable()

    def close(self) -> None:
        """Lets go of kv.sock."""
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()

    def _on_readable(self) -> None:
        try:
            message, descriptors = self._channel.receive(timeout=0.1)
        except PeerTimeoutError:
            return
        except KvxferError as error:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._gone.set()
            if self._asked and not self._asked.done():
                self._asked.set_exception(error)
            return
        if self._asked and not self._asked.done():
            self._asked.set_result((message, descriptors))
        else:
            _close(descriptors)  # what comes unasked is not kept


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def unavailable() -> RefusalError:
    """The runtime is not there, or not any more."""
    return RefusalError(app_pb2.STATUS_RUNTIME_UNAVAILABLE, "the model's runtime is not available: try again shortly")


@asynccontextmanager
async def connect(config: NodeConfig) -> AsyncIterator[RuntimeLink]:
    """Connects to the node's runtime and waits until it answers.

    Raises:
        RefusalError: it does not within the configured deadline.
    """
    deadline = time.monotonic() + config.app.start_deadline_s
    try:
        # Blocking, on purpose: there is nothing else to do yet, and a live runtime answers at once.
        channel = Channel.connect(config.sockets.kv, timeout=config.app.start_deadline_s)
    except KvxferError:
        raise unavailable() from None
    with channel:
        try:
            message, descriptors = channel.receive(timeout=max(0.01, deadline - time.monotonic()))
            if descriptors:
                raise ChannelError("a greeting carries no descriptors")
            hello = parse(message, runtime_pb2.KvHello)
        except (KvxferError, ProtocolError):
            raise unavailable() from None
        async with TritonClient(config.sockets.triton) as triton:
            if not await triton.ready(timeout=max(0.01, deadline - time.monotonic())):
                raise unavailable()
            link = RuntimeLink(channel, hello, triton)
            try:
                yield link
            finally:
                link.close()
