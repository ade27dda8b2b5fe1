"""The client to the AFM Runtime's Triton server: one `ModelStreamInfer` per request, over its Unix socket.

The protocol's messages come from `tritonclient`; its client classes are left aside, because they bring numpy and
threads into a process that lives for one request. A dead runtime is seen on kv.sock, never here: Triton keeps a stream
of a dead backend open in silence.
"""

import asyncio
import importlib
import importlib.util
import struct
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self

import grpc
import grpc.aio

from tie.daemon import rpc
from tie.daemon.errors import PeerDiedError, PeerError, PeerTimeoutError, ProtocolError
from tie.daemon.frames import parse
from tie.proto import runtime_pb2

MODEL: Final = "afm"
INPUT: Final = "request"
OUTPUT: Final = "event"
_END_S: Final = 1.0
_LENGTH: Final = struct.Struct("<I")  # how Triton frames each element of a BYTES tensor
# What Triton says, word for word, when its backend is gone or it is about to go itself.
_GONE: Final = ("is not healthy", "unknown model", "unavailable", "shutting down")


@contextmanager
def _bare_package() -> Iterator[None]:
    """Lets `tritonclient.grpc.*_pb2` be imported without running the package's own start-up (numpy, about 90 ms)."""
    spec = importlib.util.find_spec("tritonclient")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("tritonclient is not installed", name="tritonclient")
    root = Path(next(iter(spec.submodule_search_locations)))
    packages = {"tritonclient": root, "tritonclient.grpc": root / "grpc"}
    absent = {name: path for name, path in packages.items() if name not in sys.modules}
    try:
        for name, path in absent.items():
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(path)]
        yield
    finally:
        # Somebody else in this process may want the whole package; the generated modules stay registered.
        for name in absent:
            del sys.modules[name]


with _bare_package():
    service_pb2: Any = importlib.import_module("tritonclient.grpc.service_pb2")
    service_pb2_grpc: Any = importlib.import_module("tritonclient.grpc.service_pb2_grpc")


class TritonClient:
    """A connection to the runtime's Triton: `async with TritonClient(path) as client`.

    Args:
        path: the socket that Triton listens on (`config.sockets.triton`).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = AsyncExitStack()
        self._stub: Any = None

    async def __aenter__(self) -> Self:
        channel = await self._stack.enter_async_context(rpc.connect(self._path))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ready(self, *, timeout: float) -> bool:
        """Whether Triton answers within `timeout` seconds and serves the model.

        True says nothing about the backend: a killed one stays "ready" for ever.
        """
        try:
            reply = await self._stub.ModelReady(
                service_pb2.ModelReadyRequest(name=MODEL), timeout=timeout, wait_for_ready=True
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.ready)

    async def generate(
        self, request: runtime_pb2.GenerateRequest, *, timeout: float
    ) -> AsyncGenerator[runtime_pb2.GenerateEvent, None]:
        """Streams the events of one request. Closing the iterator cancels it (`contextlib.aclosing` closes at once).

        Args:
            request: what to generate.
            timeout: seconds for the whole stream.

        Raises:
            PeerDiedError: Triton is gone, or says that its backend is.
            PeerTimeoutError: the stream did not end within `timeout`.
            ProtocolError: Triton refused the request, or sent what is no event.
        """
        call = self._stub.ModelStreamInfer(timeout=timeout)
        final = False
        try:
            await call.write(_infer_request(request))
            await call.done_writing()
            async for reply in call:
                if reply.error_message:
                    raise _refusal(reply.error_message)
                final = reply.infer_response.parameters["triton_final_response"].bool_param
                if reply.infer_response.raw_output_contents:
                    yield parse(reply.infer_response.raw_output_contents[0], runtime_pb2.GenerateEvent)
                if final:
                    return
            raise PeerDiedError("the runtime ended the stream without an end")
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None
        except grpc.aio.UsageError:
            # write() on a call that ended before it began.
            raise _failure_of_code(await call.code()) from None
        finally:
            if final:
                await _ended(call)
            call.cancel()


async def _ended(call: Any) -> None:
    """Waits for Triton to end a stream whose last response has come.

    A cancellation that meets this end makes Triton keep the request, and with it the client's connection, for ever.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await call.code()


def _infer_request(request: runtime_pb2.GenerateRequest) -> Any:
    payload = request.SerializeToString()
    message = service_pb2.ModelInferRequest(model_name=MODEL)
    # An empty final response then carries the end, which a decoupled model otherwise only implies.
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    message.inputs.add(name=INPUT, datatype="BYTES", shape=[1])
    message.raw_input_contents.append(_LENGTH.pack(len(payload)) + payload)
    return message


def _refusal(text: str) -> PeerError:
    # Triton's own text may quote parts of a request: only its kind goes on.
    if any(words in text for words in _GONE):
        return PeerDiedError("the runtime's backend is gone")
    return ProtocolError("Triton refused the request")


def _failure(error: grpc.aio.AioRpcError) -> PeerError:
    return _failure_of_code(error.code())


def _failure_of_code(code: grpc.StatusCode) -> PeerError:
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return PeerTimeoutError("the runtime did not finish within the deadline")
    if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
        return PeerDiedError("Triton is gone")
    return ProtocolError(f"Triton answered {code.name}")
