"""The runtime through its real Triton: streams, refusals, cancellation, what is closed."""

import asyncio
import contextlib
import stat

import grpc
import psutil
import pytest

from kvxfer.channel import Channel
from kvxfer.errors import PeerDiedError
from tie.assets.bundle import open_bundle
from tie.assets.tokenizer import load_tokenizer
from tie.daemon import rpc
from tie.daemon.triton import TritonClient, service_pb2, service_pb2_grpc
from tie.proto import engine_pb2
from tie.proto import runtime_pb2 as pb

WAIT_S = 60.0


@pytest.fixture
async def client(runtime, node):
    async with TritonClient(node.sockets.triton) as client:
        assert await client.ready(timeout=WAIT_S)
        yield client


def request(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"token_ids": [10, 20, 30], "max_tokens": 24, "ignore_eos": True} | fields))


async def collect(client, message) -> list[pb.GenerateEvent]:
    return [event async for event in client.generate(message, timeout=WAIT_S)]


def tokens(events) -> list[int]:
    return [token for event in events if event.HasField("tokens") for token in event.tokens.token_ids]


async def idle(node) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            status = (await node.engine(status=engine_pb2.StatusRequest())).status
            if status.running + status.waiting == 0:
                return
            await asyncio.sleep(0.01)


async def test_twelve_streams_at_once_give_the_tokens_of_each_alone(client, node):
    requests = [request(token_ids=[5 + index, 6, 7]) for index in range(12)]
    alone = [tokens(await collect(client, message)) for message in requests]
    together = await asyncio.gather(*(collect(client, message) for message in requests))
    assert [tokens(events) for events in together] == alone
    assert all(len(answer) == 24 for answer in alone)
    for events in together:
        assert events[-1].finished.reason == pb.REASON_LENGTH
        assert events[-1].finished.completion_tokens == 24
    assert (await node.engine(status=engine_pb2.StatusRequest())).status.max_batch_seen > 1


async def test_a_seed_fixes_a_sampled_answer(client):
    message = request(sampling=pb.Sampling(temperature=1.5, seed=7))
    first, second = await collect(client, message), await collect(client, message)
    other = await collect(client, request(sampling=pb.Sampling(temperature=1.5, seed=8)))
    assert tokens(first) == tokens(second) != tokens(other)


async def test_a_stop_string_across_tokens(client, node):
    tokenizer = load_tokenizer(open_bundle(node.directory / "bundle"))
    text = tokenizer.decode(tokens(await collect(client, request())))
    stop = text[4:7]
    events = await collect(client, request(stop=[stop]))
    decoder = tokenizer.stream_decoder()
    fed = "".join(map(decoder.feed, tokens(events))).encode()
    assert events[-1].finished.reason == pb.REASON_STOP_STRING
    assert fed[: len(fed) - events[-1].finished.drop_bytes].decode() == text[: text.index(stop)]


async def test_a_grammar_holds_at_any_temperature(client, node):
    tokenizer = load_tokenizer(open_bundle(node.directory / "bundle"))
    sampling = pb.Sampling(temperature=2, seed=1)
    events = await collect(client, request(grammar="start: /[a-c]{5}/", sampling=sampling, ignore_eos=False))
    text = tokenizer.decode(tokens(events))
    assert len(text) == 5
    assert set(text) <= set("abc")


async def test_logprobs_come_with_every_token(client):
    events = await collect(client, request(logprobs=2, max_tokens=5))
    entries = [entry for event in events if event.HasField("tokens") for entry in event.tokens.logprobs]
    assert len(entries) == 5
    assert all(len(entry.top_ids) == 2 and entry.logprob <= 0 for entry in entries)


async def test_an_abandoned_stream_stops_generating(client, node):
    async with contextlib.aclosing(client.generate(request(max_tokens=900), timeout=WAIT_S)) as events:
        await anext(events)
    await idle(node)
    reply = await node.engine(status=engine_pb2.StatusRequest())
    assert 'outcome="cancelled"' in reply.status.metrics


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"token_ids": []}, pb.CODE_INVALID),
        ({"token_ids": [4_000_000_000]}, pb.CODE_INVALID),
        ({"token_ids": [1] * 1024}, pb.CODE_PROMPT_TOO_LONG),
        ({"max_tokens": 0}, pb.CODE_INVALID),
        ({"grammar": "start: ((("}, pb.CODE_GRAMMAR),
        ({"images": [b"not an image"]}, pb.CODE_UNSUPPORTED),
        ({"deadline_ms": 1, "max_tokens": 900}, pb.CODE_DEADLINE),
    ],
)
async def test_bad_requests_have_their_own_codes_and_harm_nobody(client, node, fields, code):
    (*_, event) = await collect(client, request(**fields))
    assert event.failed.code == code
    assert len(tokens(await collect(client, request()))) == 24


async def raw_stream(node, message):
    async with rpc.connect(node.sockets.triton) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=WAIT_S)
        await call.write(message)
        await call.done_writing()
        return [reply async for reply in call]


def infer(payloads: list[bytes], **fields):
    message = service_pb2.ModelInferRequest(model_name="afm", **fields)
    message.inputs.add(name="request", datatype="BYTES", shape=[len(payloads)])
    message.raw_input_contents.append(b"".join(len(p).to_bytes(4, "little") + p for p in payloads))
    return message


async def test_a_request_larger_than_tritons_shared_memory_gets_through(client):
    big = request(token_ids=[200] * 2_000_000)
    assert big.ByteSize() > 3 * 2**20
    for _ in range(2):
        (event,) = await collect(client, big)
        assert event.failed.code == pb.CODE_PROMPT_TOO_LONG
    assert len(tokens(await collect(client, request()))) == 24


async def test_bytes_that_are_no_request_are_refused(client, node):
    (reply,) = await raw_stream(node, infer([b"\xff\xff\xff"]))
    event = pb.GenerateEvent.FromString(reply.infer_response.raw_output_contents[0])
    assert event.failed.code == pb.CODE_INVALID
    assert len(tokens(await collect(client, request()))) == 24


async def test_a_tensor_of_the_wrong_shape_is_refused(client, node):
    (reply,) = await raw_stream(node, infer([b"", b""]))
    assert reply.error_message
    assert len(tokens(await collect(client, request()))) == 24


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("RepositoryIndex", service_pb2.RepositoryIndexRequest()),
        ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="afm")),
        ("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="afm")),
        ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest()),
        ("SystemSharedMemoryRegister", service_pb2.SystemSharedMemoryRegisterRequest(name="a", key="/b", byte_size=1)),
        ("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest()),
        ("CudaSharedMemoryStatus", service_pb2.CudaSharedMemoryStatusRequest()),
        ("CudaSharedMemoryRegister", service_pb2.CudaSharedMemoryRegisterRequest(name="a", byte_size=1)),
        ("TraceSetting", service_pb2.TraceSettingRequest()),
        ("LogSettings", service_pb2.LogSettingsRequest()),
        ("ModelStatistics", service_pb2.ModelStatisticsRequest()),
        ("ModelConfig", service_pb2.ModelConfigRequest(name="afm")),
        ("ModelMetadata", service_pb2.ModelMetadataRequest(name="afm")),
        ("ServerMetadata", service_pb2.ServerMetadataRequest()),
    ],
)
async def test_everything_but_inference_and_health_is_closed(runtime, node, method, message):
    async with rpc.connect(node.sockets.triton) as channel:
        call = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)
        for metadata in (None, [("triton-grpc-protocol-closed", "guess")]):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message, timeout=WAIT_S, metadata=metadata)
            assert "restricted" in caught.value.details()


def test_no_process_of_the_container_listens_on_a_network(runtime):
    connections = runtime.of_each(lambda member: member.net_connections(kind="inet"))
    assert not [entry for held in connections.values() for entry in held if entry.status == psutil.CONN_LISTEN]


def test_sockets_and_shared_memory_are_open_to_those_who_need_them_only(runtime, node):
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (node.sockets.triton, node.sockets.kv)}
    assert set(modes.values()) == {0o660}
    assert stat.S_IMODE(node.sockets.engine.stat().st_mode) == 0o600
    assert node.shm_regions() == []


def test_the_weights_came_by_descriptor(runtime, node):
    files = runtime.of_each(lambda member: member.open_files())
    opened = {entry.path for held in files.values() for entry in held}
    weights = {str(path) for path in (node.directory / "bundle").iterdir()}
    assert not opened & weights
    maps = [entry.path for entry in runtime.member("stub").memory_maps(grouped=True)]
    assert any("memfd:" in path for path in maps)


async def test_kv_sock_says_hello_and_drops_who_speaks(runtime, node):
    with Channel.connect(node.sockets.kv, timeout=WAIT_S) as channel:
        hello = pb.KvHello.FromString(channel.receive(timeout=WAIT_S)[0])
        status = (await node.engine(status=engine_pb2.StatusRequest())).status
        assert hello.instance_id == status.instance_id
        assert (hello.model, hello.layout_id, hello.block_tokens) == ("sample", "torch-cpu-f32", 16)
        assert hello.block_bytes > 0
        channel.send(b"anything", timeout=WAIT_S)
        with pytest.raises(PeerDiedError):
            channel.receive(timeout=WAIT_S)


async def test_engine_sock_answers_in_turn_and_survives_nonsense(runtime, node):
    with Channel.connect(node.sockets.engine, timeout=WAIT_S) as channel:
        for _ in range(2):
            channel.send(
                engine_pb2.EngineRequest(status=engine_pb2.StatusRequest()).SerializeToString(), timeout=WAIT_S
            )
            reply = engine_pb2.EngineReply.FromString(channel.receive(timeout=WAIT_S)[0])
            assert reply.status.state == engine_pb2.STATE_READY
            assert reply.status.owner_generation >= 1
        channel.send(b"\xff\xff", timeout=WAIT_S)
        with pytest.raises(PeerDiedError):
            channel.receive(timeout=WAIT_S)
    assert (await node.engine(warm=engine_pb2.WarmRequest(prompt_index=0))).error == ""
    assert (await node.engine(warm=engine_pb2.WarmRequest(prompt_index=99))).error


async def test_many_waiting_connections_do_not_stop_a_request(client, runtime, node):
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(Channel.connect(node.sockets.kv, timeout=WAIT_S))
        assert len(tokens(await collect(client, request()))) == 24


async def test_more_requests_than_the_queue_holds_are_told_busy(client):
    answers = await asyncio.gather(*(collect(client, request(max_tokens=200)) for _ in range(40)))
    last = [events[-1] for events in answers]
    assert {event.failed.code for event in last if event.HasField("failed")} == {pb.CODE_BUSY}
    assert sum(event.HasField("finished") for event in last) >= 16


def test_a_second_runtime_is_refused_while_one_lives(runtime, node):
    second = node.start("tie.runtime.launch", node.directory / "second.log")
    assert second.wait(WAIT_S) == 1
    assert "another server is live" in (node.directory / "second.log").read_text()
    assert runtime.process.poll() is None


def test_nothing_that_a_request_said_is_in_the_log(runtime):
    text = runtime.log.read_text(errors="replace")
    assert "not an image" not in text
    assert "start: (((" not in text
