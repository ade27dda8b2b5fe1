"""A real runtime on two ranks, by heads and by layers: the answers of one rank, transfers, and the death of a rank."""

import asyncio
import hashlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from kv_memory import Promised, fill
from kvxfer import transfer
from kvxfer.channel import Channel
from kvxfer.transfer import Consumer
from tie.app.runtime_link import connect
from tie.assets.bundle import open_bundle
from tie.bones.batch import Batch, SequenceSlice
from tie.bones.config import ModelConfig
from tie.daemon.config import RuntimeConfig
from tie.daemon.triton import TritonClient
from tie.proto import engine_pb2
from tie.proto import runtime_pb2 as pb
from tie.runtime.executors import make_executor
from tie.runtime.kv_blocks import Format
from tie.runtime.owner_client import attach
from tie.runtime.prefix_pool import Place, PoolClient
from waiting import wait_for

WAIT_S = 60.0
NOTICE_S = 10.0
DEADLINE_S = 5.0
COUNT = 24
LAYOUT = "torch-cpu-f32"
SPLITS = {"tp2": "tensor_parallel = 2", "pp2": "pipeline_parallel = 2"}

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def on(*names):
    """The same node for all tests of a split."""
    splits = [pytest.param(f"{SPLITS[name]}\nrank_deadline_s = {DEADLINE_S}", id=name) for name in names]
    return pytest.mark.parametrize("node", splits, indirect=True, scope="module")


@pytest.fixture(scope="module")
def alone(node):
    """Greedy answers of one rank, on the same weights of the same owner."""
    weights = attach(node.sockets.owner, LAYOUT, timeout=WAIT_S, progress=lambda *_: None)
    config = RuntimeConfig(executor="torch", dtype="f32", threads=1, kv_tokens=1024)
    executor = make_executor(config, ModelConfig.from_json(weights.config_json), weights, LAYOUT)

    def answer(prompt, count=COUNT):
        tokens, start = list(prompt), 0
        while len(tokens) < len(prompt) + count:
            part = SequenceSlice(tokens[start:], start, range(64), 1)
            start = len(tokens)
            tokens.append(int(executor.forward(Batch((part,)))[0].argmax()))
        return tokens[len(prompt) :]

    return answer


async def answer(link, prompt, **fields):
    """Its tokens, and its end."""
    message = pb.GenerateRequest(token_ids=prompt, max_tokens=COUNT, ignore_eos=True, **fields)
    events = [event async for event in link.triton.generate(message, timeout=WAIT_S)]
    tokens = [token for event in events if event.HasField("tokens") for token in event.tokens.token_ids]
    return tokens, events[-1].finished


def rank_of(runtime) -> psutil.Process:
    (rank,) = [member for member in runtime.members if "tie.runtime.rank" in member.cmdline()]
    return rank


@on(*SPLITS)
async def test_two_ranks_answer_as_one(node, runtime, alone):
    status = (await node.engine(status=engine_pb2.StatusRequest())).status
    assert status.executor in {f"{LAYOUT}-{name}" for name in SPLITS}
    prompts = [list(range(5, 70)), [5, 6, 7], list(range(100, 120))]
    async with connect(node.config) as link:
        answers = await asyncio.gather(*(answer(link, prompt) for prompt in prompts))
    assert [tokens for tokens, _ in answers] == [alone(prompt) for prompt in prompts]


@on(*SPLITS)
async def test_a_turn_goes_on_from_the_blocks_of_all_ranks(node, runtime, alone):
    first = list(range(30, 130))
    async with connect(node.config) as link:
        ticket, (channel,) = await link.ask(pb.KvRequest(prepare_export=pb.PrepareExport()), 1)
        tokens, _ = await answer(link, first, export_ticket=ticket)
        exported = Promised(ticket, Channel.adopt(channel))
        header, contents = await asyncio.to_thread(_blocks, exported)
        assert (header.layout, header.token_count) == (link.format.layout, (len(first) + COUNT - 1) // 16 * 16)

        second = [*first, *tokens, 200, 201, 202]
        prepare = pb.PrepareImport(block_count=len(contents))
        ticket, descriptors = await link.ask(pb.KvRequest(prepare_import=prepare), 2)
        imported = Promised(ticket, Channel.adopt(descriptors[0]), descriptors[1])
        restored, _ = await asyncio.gather(
            answer(link, second, import_ticket=ticket), asyncio.to_thread(fill, imported, header, contents)
        )
        imported.close()
    assert restored[0] == alone(second)
    assert restored[1].cached_tokens == header.token_count


def _blocks(exported):
    transfer.request(exported.channel, 0, timeout=WAIT_S)
    with Consumer(exported.channel, max_bytes=1 << 28, timeout=WAIT_S) as consumer:
        consumer.wait(consumer.header.block_count, timeout=WAIT_S)
        consumer.finish(timeout=WAIT_S)
        contents = [bytes(consumer.block(index)) for index in range(consumer.header.block_count)]
        found = consumer.header, contents
    exported.close()
    return found


@on("tp2")
def test_ranks_have_a_network_of_their_own(node, runtime):
    """Nothing but loopback, and not everybody's: what they exchange passes there."""
    theirs = {_network(process.pid) for process in (rank_of(runtime), runtime.member("triton"))}
    assert len(theirs) == 1
    assert theirs != {_network("self")}
    listening = [each for each in rank_of(runtime).net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert all(each.laddr.ip == "127.0.0.1" for each in listening)


@on(*SPLITS)
def test_all_ranks_map_the_owner_s_one_arena(node, runtime):
    """For reading; and each has a KV pool of its own, which rank 0 maps as well."""
    owner, stub, rank = (_maps(pid) for pid in (node.owner.pid, runtime.member("stub").pid, rank_of(runtime).pid))
    assert owner["tie-weights"] == stub["tie-weights"] == rank["tie-weights"]
    assert {rights for _, rights in rank["tie-weights"]} == {"r--s"}
    assert stub["tie-rank-kv"] == rank["tie-rank-kv"] != set()
    assert "tie-rank-kv" not in owner


def _maps(pid) -> dict[str, set[tuple[str, str]]]:
    """Of each kind of memfd: which, and with what rights."""
    found: dict[str, set[tuple[str, str]]] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, rights, _, _, inode, *path = line.split()
        if path and path[0].startswith("/memfd:"):
            found.setdefault(path[0].removeprefix("/memfd:"), set()).add((inode, rights))
    return found


def _network(process) -> Path:
    return Path(f"/proc/{process}/ns/net").readlink()


@on("tp2")
async def test_registered_prompts_are_computed_once_for_all_ranks(node, runtime, alone):
    """Restored by the next runtime; where a rank has none, discarded, and computed afresh. Never another answer."""
    (registered,) = open_bundle(node.directory / "bundle").manifest.system_prompts
    prompt = [*registered.token_ids, *range(60, 90)]
    whole = len(registered.token_ids) // 16 * 16
    expected = alone(prompt)

    async def served():
        async with connect(node.config) as link:
            tokens, end = await answer(link, prompt)
        return tokens, end.cached_tokens

    async def warmed():
        return (await node.engine(warm=engine_pb2.WarmRequest(prompt_index=0))).status.prefix

    first = await warmed()
    assert (first.state, first.restored, await served()) == ("sealed", False, (expected, whole))
    runtime.stop()
    second = node.launch()
    assert (await warmed()).restored
    assert await served() == (expected, whole)
    second.stop()
    _lose_a_rank(node.sockets.owner)
    third = node.launch()
    assert third.has("prefix.discarded", reason="rank-not-ready")
    assert await served() == (expected, 0)
    assert (await warmed()).state == "sealed"
    assert await served() == (expected, whole)


def _lose_a_rank(owner):
    """Leaves a sealed pool of rank 1 and none of rank 0."""
    client = PoolClient(owner, Place(1, 2))
    client.reset()
    header = Format("sample", "release", "layout", 16, 64).header(0, 1)
    pool, metadata = client.allocate(header, 1)
    os.pwrite(metadata, b"x", 0)
    client.seal(b"x", hashlib.sha256(b"x").digest(), bytes(32))
    os.close(pool)
    os.close(metadata)
    client.close()


@on(*SPLITS)
async def test_a_rank_that_dies_takes_the_runtime_down(node):
    await _end_by(node, signal.SIGKILL, NOTICE_S)


@on("tp2")
async def test_a_rank_that_hangs_takes_the_runtime_down(node):
    """The others wait no longer than their deadline, and the kernel kills what stands still."""
    await _end_by(node, signal.SIGSTOP, DEADLINE_S + NOTICE_S)


async def _end_by(node, kind, notice_s):
    running = [one for one in node.runtimes[-1:] if one.process.poll() is None]
    runtime = running[0] if running else node.launch()
    rank = rank_of(runtime)
    async with TritonClient(node.sockets.triton) as client:
        message = pb.GenerateRequest(token_ids=[1, 2], max_tokens=1000, ignore_eos=True)
        events = client.generate(message, timeout=WAIT_S)
        assert (await anext(events)).HasField("tokens")
        rank.send_signal(kind)
        async with asyncio.timeout(notice_s):
            ends = [event.failed.code async for event in events if event.HasField("failed")]
    assert ends == [pb.CODE_INTERNAL]
    await asyncio.to_thread(psutil.wait_procs, [rank], timeout=NOTICE_S)
    assert not rank.is_running()
    await asyncio.to_thread(wait_for, lambda: runtime.has("probe.state", reason="engine-gone"))
    runtime.stop()
