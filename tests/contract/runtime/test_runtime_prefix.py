"""A real runtime and a real owner: registered prompts are computed once, restored, and never taken on trust."""

import hashlib

import pytest

from status_probe.engine_client import DeathNotice
from tie.assets.bundle import open_bundle
from tie.bones.blocks import HostBlocks
from tie.proto import engine_pb2
from tie.runtime.kv_blocks import Format, Kept
from tie.runtime.prefix_pool import Place, PoolClient
from tie.runtime.prefixes import Prefixes, State

WARM = {"warm": engine_pb2.WarmRequest(prompt_index=0)}
STATUS = {"status": engine_pb2.StatusRequest()}


class Garbage(HostBlocks):
    """Blocks of a runtime that does not compute."""

    def __init__(self, size):
        self.block_bytes = size
        self.data = bytearray(b"\x42" * size)

    def block_view(self, _):
        return memoryview(self.data)


def poison(node, hello):
    """Puts a pool in place that is sealed and right in all that it says, save for what its blocks are."""
    manifest = open_bundle(node.directory / "bundle").manifest
    blocks = Format(hello.model, hello.release, hello.layout_id, hello.block_tokens, hello.block_bytes)
    prefixes = Prefixes(
        node.sockets.owner,
        manifest,
        format=blocks,
        parts=[Garbage(hello.block_bytes)],
        most_blocks=100,
        on_ready=lambda *_: None,
    )
    honest = prefixes._seal

    def seal(filling):
        filling.digests = dict.fromkeys(filling.digests, hashlib.sha256(b"other").digest())
        honest(filling)

    prefixes._seal = seal
    count = len(manifest.system_prompts[0].token_ids) // hello.block_tokens
    prefixes.warm(0, lambda _: Kept(tuple(range(count)), lambda: None))
    assert prefixes.state is State.SEALED
    prefixes.close()


async def test_what_one_runtime_computed_the_next_restores(node):
    first = node.launch()
    assert (await node.engine(**STATUS)).status.prefix.state == "cold"
    warmed = await node.engine(**WARM)
    assert (warmed.error, warmed.status.prefix.state, warmed.status.prefix.restored) == ("", "sealed", False)
    assert warmed.status.prefix.blocks > 0
    first.stop()
    second = node.launch()
    status = (await node.engine(**STATUS)).status
    assert (status.prefix.state, status.prefix.restored) == ("sealed", True)
    steps = status.steps
    assert (await node.engine(**WARM)).error == ""
    assert "tie_runtime_prefix_hot_blocks 0.0" in (await node.engine(**STATUS)).status.metrics
    assert (await node.engine(**STATUS)).status.steps - steps < 5, "nothing but canaries was computed"
    second.stop()


async def test_a_damaged_pool_stops_the_start_and_the_one_after_computes_anew(node):
    runtime = node.launch()
    notice = await DeathNotice.connect(node.sockets.kv, timeout=10)
    notice.close()
    runtime.stop()
    reset(node)
    poison(node, notice.hello)
    broken = type(runtime)(node)
    broken.process.wait(60)
    assert broken.has("runtime.start-failed", error_type="PoolDamagedError")
    assert not broken.has("runtime.started")
    third = node.launch()
    assert (await node.engine(**STATUS)).status.prefix.state == "cold"
    assert (await node.engine(**WARM)).status.prefix.state == "sealed"
    third.stop()


def reset(node):
    client = PoolClient(node.sockets.owner, Place())
    client.reset()
    client.close()


@pytest.fixture(autouse=True)
def _no_pool(node):
    yield
    reset(node)
