"""gRPC over Unix sockets, with the guards that gRPC in Python lacks.

A server claims its path (`tie.daemon.socket_path`), sets the socket's mode, and refuses unary calls without a deadline.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tie.daemon.socket_path import claim
from tie.proto import metrics_pb2, metrics_pb2_grpc

_OPTIONS = [("grpc.max_receive_message_length", 4 * 1024 * 1024), ("grpc.so_reuseport", 0)]


# Generic for the type checker only: at run time grpc's classes take no parameters.
if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor


class _DeadlineInterceptor(_Interceptor):
    """Refuses unary calls without a deadline: the default is for ever."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.response_streaming:
            return handler
        inner = handler.unary_unary

        async def guarded(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
            if context.time_remaining() is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "calls need a deadline")
            return await inner(request, context)

        return grpc.unary_unary_rpc_method_handler(
            guarded, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )


class _MetricsServicer(metrics_pb2_grpc.MetricsServicer):
    def __init__(self, text: Callable[[], str | Awaitable[str]]) -> None:
        self._text = text

    async def Scrape(  # noqa: N802 (generated name)
        self, request: metrics_pb2.ScrapeRequest, context: Any
    ) -> metrics_pb2.ScrapeReply:
        del request, context
        text = self._text()
        return metrics_pb2.ScrapeReply(text=text if isinstance(text, str) else await text)


@asynccontextmanager
async def serve(
    path: Path,
    register: Callable[[grpc.aio.Server], None],
    *,
    metrics: Callable[[], str | Awaitable[str]] | None = None,
    grace: float = 1.0,
) -> AsyncIterator[grpc.aio.Server]:
    """Runs a gRPC server on `path` for the length of the block.

    Args:
        path: the socket, mode 0660.
        register: adds the servicers.
        metrics: gives this daemon's metrics as Prometheus text; served as `Metrics.Scrape` when given.
        grace: seconds that running calls get at the end.

    Raises:
        SocketInUseError: a live server holds the path.
    """
    lock = claim(path)
    server = grpc.aio.server(interceptors=[_DeadlineInterceptor()], options=_OPTIONS)
    try:
        register(server)
        if metrics is not None:
            metrics_pb2_grpc.add_MetricsServicer_to_server(_MetricsServicer(metrics), server)
        # bind() makes the socket with the umask's mode; there is no moment at which it is open to others.
        before = os.umask(0o117)
        try:
            server.add_insecure_port(f"unix:{path}")
            await server.start()
        finally:
            os.umask(before)
        yield server
    finally:
        await server.stop(grace)
        os.close(lock)


@asynccontextmanager
async def connect(path: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the server on `path`, closed at the end of the block. Calls still need their own `timeout=`."""
    options = [
        # A dead daemon comes back within a second or two: gRPC's default back-off would sleep through it.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    channel = grpc.aio.insecure_channel(f"unix:{path}", options=options)
    try:
        yield channel
    finally:
        await channel.close(None)


async def wait_ready(channel: grpc.aio.Channel, timeout: float) -> None:
    """Waits until the channel's server answers.

    Raises:
        TimeoutError: it did not within `timeout` seconds.
    """
    async with asyncio.timeout(timeout):
        await channel.channel_ready()
