"""The Triton client against a scripted server: what each kind of trouble becomes."""

import asyncio
import contextlib
import subprocess
import sys

import grpc
import pytest

from tie.daemon import rpc, triton
from tie.daemon.errors import PeerDiedError, PeerTimeoutError, ProtocolError
from tie.daemon.triton import TritonClient, service_pb2, service_pb2_grpc
from tie.proto import runtime_pb2

EVENT = runtime_pb2.GenerateEvent(tokens=runtime_pb2.Tokens(token_ids=[1, 2]))


def reply(payload: bytes | None = None, *, final: bool = False, error: str = ""):
    message = service_pb2.ModelStreamInferResponse(error_message=error)
    if payload is not None:
        message.infer_response.raw_output_contents.append(payload)
    message.infer_response.parameters["triton_final_response"].bool_param = final
    return message


def element(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


class Scripted(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, replies, *, hang=False, abort=None):
        self.replies, self.hang, self.abort = replies, hang, abort
        self.cancelled = asyncio.Event()
        self.requests = []

    async def ModelReady(self, request, context):  # noqa: N802, ARG002 (generated name)
        return service_pb2.ModelReadyResponse(ready=request.name == "afm")

    async def ModelStreamInfer(self, requests, context):  # noqa: N802 (generated name)
        async for request in requests:
            self.requests.append(request)
        for message in self.replies:
            yield message
        if self.abort:
            await context.abort(self.abort, "a secret")
        if self.hang:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise


@contextlib.asynccontextmanager
async def serving(tmp_path, scripted):
    def register(server):
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(scripted, server)

    async with rpc.serve(tmp_path / "t.sock", register, grace=0.1), TritonClient(tmp_path / "t.sock") as client:
        yield client


async def collect(client, timeout=10):
    request = runtime_pb2.GenerateRequest(token_ids=[7])
    return [event async for event in client.generate(request, timeout=timeout)]


async def test_events_come_until_the_final_response(tmp_path):
    data = EVENT.SerializeToString()
    scripted = Scripted([reply(data), reply(data, final=True), reply(data)])
    async with serving(tmp_path, scripted) as client:
        assert await client.ready(timeout=5)
        assert await collect(client) == [EVENT, EVENT]
    (request,) = scripted.requests
    assert request.raw_input_contents[0] == element(runtime_pb2.GenerateRequest(token_ids=[7]).SerializeToString())


@pytest.mark.parametrize("reads_on", [False, True])
async def test_a_stream_whose_end_has_come_is_left_to_end_by_itself(tmp_path, monkeypatch, reads_on):
    """Real Triton keeps the connection for ever when a cancellation meets the end, also of who reads no further."""
    monkeypatch.setattr(triton, "_END_S", 30.0)
    may_end, ended = asyncio.Event(), asyncio.Event()

    class Slow(Scripted):
        async def ModelStreamInfer(self, requests, context):  # noqa: N802 (generated name)
            async for message in super().ModelStreamInfer(requests, context):
                yield message
            await may_end.wait()  # cancelled, this raises
            ended.set()

    async with serving(tmp_path, Slow([reply(EVENT.SerializeToString(), final=True)])) as client:
        request = runtime_pb2.GenerateRequest(token_ids=[7])
        events = client.generate(request, timeout=10)
        assert await anext(events) == EVENT

        async def leave():
            if reads_on:
                assert await anext(events, None) is None
            await events.aclose()

        leaving = asyncio.create_task(leave())
        for _ in range(2):  # on the same connection: a cancellation would have come before them
            assert await client.ready(timeout=5)
        assert not leaving.done()
        may_end.set()
        await asyncio.wait_for(leaving, 10)
        assert ended.is_set()


async def test_an_empty_final_response_ends_as_well(tmp_path):
    data = EVENT.SerializeToString()
    async with serving(tmp_path, Scripted([reply(data), reply(final=True)])) as client:
        assert await collect(client) == [EVENT]


@pytest.mark.parametrize(
    ("scripted", "error"),
    [
        ({"replies": [reply(error="Stub process 'afm_0_0' is not healthy.")]}, PeerDiedError),
        ({"replies": [reply(error="Request for unknown model: 'afm' is not found")]}, PeerDiedError),
        ({"replies": [reply(error="unexpected shape for a secret")]}, ProtocolError),
        ({"replies": [reply(b"\x00")]}, ProtocolError),
        ({"replies": [reply(b"\xff\xff")]}, ProtocolError),
        ({"replies": []}, PeerDiedError),
        ({"replies": [], "abort": grpc.StatusCode.UNAVAILABLE}, PeerDiedError),
        ({"replies": [], "abort": grpc.StatusCode.INTERNAL}, ProtocolError),
    ],
)
async def test_each_trouble_is_its_own_error_and_quotes_nothing(tmp_path, scripted, error):
    async with serving(tmp_path, Scripted(**scripted)) as client:
        with pytest.raises(error) as caught:
            await collect(client)
    assert "secret" not in str(caught.value)


async def test_silence_is_a_timeout(tmp_path):
    async with serving(tmp_path, Scripted([], hang=True)) as client:
        with pytest.raises(PeerTimeoutError):
            await collect(client, timeout=0.2)


async def test_closing_the_iterator_cancels_the_call(tmp_path):
    scripted = Scripted([reply(EVENT.SerializeToString())], hang=True)
    async with serving(tmp_path, scripted) as client:
        events = client.generate(runtime_pb2.GenerateRequest(), timeout=30)
        assert await anext(events) == EVENT
        await events.aclose()
        await asyncio.wait_for(scripted.cancelled.wait(), 5)


async def test_nobody_there(tmp_path):
    async with TritonClient(tmp_path / "none.sock") as client:
        assert not await client.ready(timeout=0.2)
        with pytest.raises(PeerDiedError):
            await collect(client)


def test_the_client_brings_no_numpy_into_a_process():
    code = "import sys, tie.daemon.triton; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
