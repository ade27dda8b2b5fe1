"""A runtime that restores a prefix pool: every kind of disagreement is injected, and nothing wrong is ever served."""

import gc
import hashlib
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import seals
from kvxfer.header import Header
from tie.assets.manifest import Architecture, FileEntry, Manifest, SystemPrompt, TokenizerInfo
from tie.bones.blocks import HostBlocks
from tie.daemon.errors import PeerDiedError, PeerError
from tie.proto import owner_pb2 as pb
from tie.runtime import prefixes
from tie.runtime.kv_blocks import Format, Kept
from tie.runtime.prefix_pool import Place, PoolClient, PoolMemory, format_of
from tie.runtime.prefix_restore import Expected, PoolDamagedError, disagreement, metadata_of, restore
from tie.runtime.prefix_trie import Identity, PrefixTrie
from tie.runtime.prefixes import Prefixes, State, WarmError

TOKENS = 4
BYTES = 64
FORMAT = Format("model", "release", "layout", TOKENS, BYTES)
PROMPTS = {"one": tuple(range(1, 12)), "two": (1, 2, 3, 4, 9, 9, 9, 9), "short": (7, 7)}
BLOCKS = 3  # two of "one", one of "two"; its first is shared, "short" has none


def manifest(prompts=PROMPTS, **changes) -> Manifest:
    files = {name: FileEntry(sha256="0" * 64, bytes=1) for name in ("tokenizer.json", "tensors.json", "w.gguf")}
    shape = Architecture(
        kind="llama", hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
        vocab_size=300, context_tokens=64, rms_norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip
    fields = {
        "model": "model",
        "release": "release",
        "architecture": shape,
        "files": files,
        "weights": ("w.gguf",),
        "weights_format": "gguf",
        "tokenizer": TokenizerInfo(end_of_turn_ids=(2,)),
        "system_prompts": tuple(SystemPrompt(name=name, text=name, token_ids=ids) for name, ids in prompts.items()),
    }
    return Manifest(**(fields | changes))


class Runtime(HostBlocks):
    """The part of one that has to do with prefixes. Its blocks' bytes follow from the tokens up to there."""

    def __init__(self, path, *, bundle=None, format=FORMAT, place=None, most_blocks=9) -> None:  # noqa: A002
        self.data = bytearray(64 * format.block_bytes)
        self.computed: list[tuple[int, ...]] = []
        self.pool: PoolMemory | None = None
        self.format = format
        self.salt = b"%d" % (place or Place()).rank
        self.prefixes = Prefixes(
            path,
            bundle or manifest(),
            format=format,
            place=place or Place(),
            memory=self,
            most_blocks=most_blocks,
            on_ready=self._ready,
        )

    def _ready(self, trie, pool):  # noqa: ARG002 (the signature is the hook's)
        self.pool = pool

    def block_view(self, block):
        return memoryview(self.data)[block * self.format.block_bytes : (block + 1) * self.format.block_bytes]

    def bytes_of(self, tokens) -> bytes:
        return (hashlib.sha256(self.salt + bytes(tokens)).digest() * 64)[: self.format.block_bytes]

    def compute(self, prompt) -> Kept:
        self.computed.append(tuple(prompt))
        size = self.format.block_tokens
        blocks = range(10, 10 + len(prompt) // size)  # somewhere in the pool
        for index, block in enumerate(blocks):
            self.block_view(block)[:] = self.bytes_of(prompt[: (index + 1) * size])
        return Kept(tuple(blocks), lambda: None)

    def warm(self) -> "Runtime":
        for index in range(len(PROMPTS)):
            self.prefixes.warm(index, self.compute)
        return self

    def sound(self) -> bool:
        """Whether every block that it would serve is the right one."""
        assert self.pool is not None
        prompts = [prompt for prompt in PROMPTS.values() if len(prompt) >= TOKENS]
        return all(
            bytes(self.pool.block(node)) == self.bytes_of(prompt[: (index + 1) * TOKENS])
            for prompt in prompts
            for index, node in enumerate(self.prefixes.trie.path(prompt))
        )


def mappings() -> dict[int, str]:
    """Of pools in this process: where, and with which rights. Those of tests before this one are gone."""
    gc.collect()
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "tie-prefix-pool" in line]
    return {int(line.split("-")[0], 16): line.split()[1] for line in lines}


@pytest.fixture
def path(pool_owner):
    return pool_owner.path


def restarted(path, **changes) -> Runtime:
    runtime = Runtime(path, **changes)
    runtime.prefixes.restore()
    return runtime


def test_the_first_runtime_computes_and_the_next_does_not(path, pool_owner):
    first = restarted(path)
    assert first.prefixes.state is State.COLD
    first.warm()
    assert first.prefixes.state is State.SEALED
    assert first.computed == [PROMPTS["one"], PROMPTS["two"]]
    assert first.sound()
    second = restarted(path)
    assert (second.prefixes.state, second.prefixes.restored) == (State.SEALED, True)
    assert second.sound()
    second.warm()
    assert second.computed == []
    assert (pool_owner.pools.seals, pool_owner.pools.restores, pool_owner.pools.resets) == (1, 1, 0)


def test_a_restored_pool_is_mapped_for_reading_only(path):
    restarted(path).warm()
    second = restarted(path)
    with pytest.raises(TypeError):
        second.pool.block(0)[0] = 1


def test_who_filled_the_pool_can_write_it_no_more(path):
    first = restarted(path).warm()
    with pytest.raises(TypeError):
        first.pool.block(0)[0] = 1
    assert "w" not in mappings()[first.pool._address]


@dataclass
class Spoilt:
    """How a pool is made wrong, and by what the next runtime notices."""

    spoil: object = None  # of the owner's own state of rank 0
    expects: dict = None  # what the next runtime is instead
    reason: str = ""


def _edit(**changes):
    def spoil(pool):
        pool.header = replace(pool.header, **changes)

    return spoil


def _truncate_metadata(pool):
    data = os.pread(pool.metadata, pool.metadata_bytes, 0)
    _replace_metadata(pool, data[: len(data) // 2], hash_it=True)


def _replace_metadata(pool, data, *, hash_it):
    descriptor = os.memfd_create("spoilt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    seals.add(descriptor, seals.IMMUTABLE)
    os.dup2(descriptor, pool.metadata)
    os.close(descriptor)
    pool.metadata_bytes = len(data)
    if hash_it:
        pool.metadata_sha256 = hashlib.sha256(data).digest()


def _metadata(**changes):
    def spoil(pool):
        message = pb.PoolMetadata.FromString(os.pread(pool.metadata, pool.metadata_bytes, 0))
        for name, change in changes.items():
            value = change(getattr(message, name))
            message.ClearField(name)
            if name == "trie":
                message.trie = value
            else:
                message.block_sha256.extend(value)
        _replace_metadata(pool, message.SerializeToString(), hash_it=True)

    return spoil


def _attribute(name, value):
    return lambda pool: setattr(pool, name, value)


def _unsealed(pool):
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, pool.header.buffer_bytes)
    os.dup2(descriptor, pool.pool)
    os.close(descriptor)


OTHER_PROMPTS = PROMPTS | {"one": (5, 5, 5, 5, 5, 5, 5, 5, 5)}
DISCARDED = {
    "another model": Spoilt(_edit(model="other"), reason="model"),
    "another release": Spoilt(_edit(release="other"), reason="release"),
    "another layout": Spoilt(_edit(layout="other"), reason="layout-id"),
    "another block size": Spoilt(_edit(block_bytes=128), reason="block-bytes"),
    "more tokens in a block": Spoilt(_edit(block_tokens=8, token_count=24), reason="block-tokens"),
    "fewer blocks": Spoilt(_edit(block_count=2, token_count=8), reason="block-count"),
    "another trie": Spoilt(_attribute("trie_sha256", bytes(32)), reason="trie"),
    "another split": Spoilt(_attribute("world_size", 2), reason="world-size"),
    "still being filled": Spoilt(_attribute("holder", "nobody"), reason="rank-not-ready"),
    "metadata cut off": Spoilt(_truncate_metadata, reason="metadata"),
    "metadata empty": Spoilt(_attribute("metadata_bytes", 0), reason="metadata"),
    "metadata's hash wrong": Spoilt(_attribute("metadata_sha256", bytes(32)), reason="metadata"),
    "metadata is garbage": Spoilt(lambda pool: _replace_metadata(pool, b"\xff" * 90, hash_it=True), reason="metadata"),
    "metadata of another trie": Spoilt(_metadata(trie=lambda trie: trie + b"\x00"), reason="metadata"),
    "a block's hash is missing": Spoilt(_metadata(block_sha256=lambda all_: list(all_)[:-1]), reason="metadata"),
    "a block's hash is cut": Spoilt(_metadata(block_sha256=lambda all_: [b"x", *list(all_)[1:]]), reason="metadata"),
    "the pool is not sealed": Spoilt(_unsealed, reason="metadata"),
    # The runtime is another; the pool is as it was made.
    "new prompts": Spoilt(expects={"bundle": manifest(OTHER_PROMPTS)}, reason="block-count"),
    "new prompts of equal length": Spoilt(
        expects={"bundle": manifest(PROMPTS | {"two": (1, 2, 3, 4, 8, 8, 8, 8)})}, reason="trie"
    ),
    "new weights under the old release": Spoilt(
        expects={"bundle": manifest(files={
            name: FileEntry(sha256="1" * 64, bytes=1) for name in ("tokenizer.json", "tensors.json", "w.gguf")
        })}, reason="trie",
    ),
    "the runtime's own layout changed": Spoilt(expects={"format": replace(FORMAT, layout="new")}, reason="layout-id"),
    "the runtime has another block size": Spoilt(
        expects={"format": replace(FORMAT, block_bytes=128)}, reason="block-bytes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DISCARDED)
def test_a_pool_that_disagrees_is_discarded_and_computed_afresh(name, path, pool_owner, capfd):
    spoilt = DISCARDED[name]
    restarted(path).warm()
    if spoilt.spoil:
        spoilt.spoil(pool_owner.pools._pools[0])
    second = restarted(path, **(spoilt.expects or {}))
    assert f'"reason":"{spoilt.reason}"' in capfd.readouterr().err.replace(" ", "")
    assert (second.prefixes.state, second.pool) == (State.COLD, None)
    assert pool_owner.pools.resets == 1
    assert pool_owner.pools._pools == {}
    if not spoilt.expects:
        second.warm()
        assert second.sound()
        assert len(second.computed) == 2
        third = restarted(path)
        assert (third.prefixes.state, third.computed) == (State.SEALED, [])
        assert third.sound()


def _filled(path, change):
    """A pool whose blocks are changed before it is sealed, under metadata that says otherwise."""
    runtime = Runtime(path)
    honest = runtime.prefixes._seal

    def seal(filling):
        change(filling.memory)
        honest(filling)

    runtime.prefixes._seal = seal
    runtime.warm()


def _other_header(memory):
    memory._view[: mmap.PAGESIZE] = Header("model", "old", "layout", TOKENS, BYTES, BLOCKS, 0, 12).pack()


DAMAGED = {
    "a byte of a block": lambda memory: memory.block(1).__setitem__(5, memory.block(1)[5] ^ 1),
    "the header of another release": _other_header,
    "a header page of zeros": lambda memory: memory._view.__setitem__(
        slice(0, mmap.PAGESIZE), bytes(mmap.PAGESIZE)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_pool_stops_the_start_and_the_next_one_computes(name, path, pool_owner):
    _filled(path, DAMAGED[name])
    mapped = mappings()
    second = Runtime(path)
    with pytest.raises(PoolDamagedError, match="prefix pool"):
        second.prefixes.restore()
    assert second.pool is None
    assert mappings() == mapped, "it is unmapped"
    assert pool_owner.pools.resets == 1
    third = restarted(path).warm()
    assert third.sound()


def test_two_ranks_restore_only_what_all_of_them_have(path, pool_owner):
    places = [Place(0, 2), Place(1, 2)]
    ranks = [Runtime(path, place=place) for place in places]
    ranks[0].warm()
    # One rank is missing: the first that looks discards everything, and both compute.
    assert Runtime(path, place=places[0]).prefixes.restore() is None
    assert pool_owner.pools._pools == {}
    for rank in [Runtime(path, place=place) for place in places]:
        rank.warm()
    again = [restarted(path, place=place) for place in places]
    assert [rank.prefixes.state for rank in again] == [State.SEALED] * 2
    assert all(rank.sound() for rank in again)
    # Each has its own slice.
    assert bytes(again[0].pool.block(0)) != bytes(again[1].pool.block(0))


@pytest.mark.parametrize("name", [name for name, spoilt in DISCARDED.items() if spoilt.spoil])
def test_two_ranks_discard_when_one_disagrees(name, path, pool_owner):
    places = [Place(0, 2), Place(1, 2)]
    for place in places:
        Runtime(path, place=place).warm()
    spoil = _attribute("world_size", 3) if name == "another split" else DISCARDED[name].spoil
    spoil(pool_owner.pools._pools[1])
    # The rank whose own state is wrong notices; the controllable rest is in the states that every rank sees.
    noticed = Runtime(path, place=places[1])
    assert noticed.prefixes.restore() is None
    assert noticed.prefixes.state is State.COLD
    assert pool_owner.pools._pools == {}
    for place in places:
        Runtime(path, place=place).warm()
    assert all(restarted(path, place=place).sound() for place in places)


EXPECTED = Expected(FORMAT.header(0, BLOCKS), b"trie", Place(0, 2))
STATE = {
    "stage": pb.POOL_STAGE_SEALED,
    "world_size": 2,
    "format": format_of(EXPECTED.header),
    "pool_bytes": EXPECTED.header.buffer_bytes,
    "trie_sha256": EXPECTED.trie_sha256,
}


def test_agreement_is_of_all_ranks():
    sound = pb.PoolState(**STATE)
    assert disagreement([sound, sound], EXPECTED) == ""
    assert disagreement([sound], EXPECTED) == "rank-missing"
    assert disagreement([sound, pb.PoolState(stage=pb.POOL_STAGE_EMPTY)], EXPECTED) == "rank-not-ready"
    assert disagreement([pb.PoolState(stage=pb.POOL_STAGE_EMPTY)] * 2, EXPECTED) == "empty"
    assert disagreement([sound, pb.PoolState(**(STATE | {"pool_bytes": 1}))], EXPECTED) == "pool-bytes"
    assert disagreement([sound, pb.PoolState()], EXPECTED) == "rank-not-ready"


@given(st.binary(max_size=300))
def test_no_bytes_of_the_owner_are_taken_for_agreement(data):
    state = pb.PoolState()
    try:
        state.ParseFromString(data)
    except Exception:  # noqa: BLE001 (not a message)
        return
    sound = pb.PoolState(**STATE)
    assert (disagreement([sound, state], EXPECTED) == "") == (
        all(getattr(state, name) == STATE[name] for name in STATE)
    )


# --- while it is filled ---


def test_an_owner_that_goes_while_the_pool_is_filled_costs_a_new_start(path, pool_owner):
    runtime = Runtime(path)
    runtime.prefixes.warm(0, runtime.compute)
    assert runtime.prefixes.state is State.FILLING
    pool_owner.close()
    with pytest.raises(PeerError):
        runtime.prefixes.warm(1, runtime.compute)
    assert runtime.prefixes.state is State.COLD
    with pytest.raises(PeerDiedError):
        runtime.prefixes.warm(0, runtime.compute)


def test_a_runtime_that_ends_while_it_fills_leaves_nothing(path, pool_owner):
    runtime = Runtime(path)
    runtime.prefixes.warm(0, runtime.compute)
    runtime.prefixes.close()
    later = restarted(path)
    assert later.prefixes.state is State.COLD
    assert later.warm().sound()


def test_a_prompt_that_cannot_be_computed_leaves_the_cache_cold(path):
    runtime = Runtime(path)

    def fails(prompt):
        raise WarmError("no")

    with pytest.raises(WarmError):
        runtime.prefixes.warm(0, fails)
    assert runtime.prefixes.state is State.COLD
    assert runtime.warm().sound()


def test_neither_another_prompt_nor_the_end_waits_for_ever_for_one_that_hangs(path, monkeypatch, capfd):
    monkeypatch.setattr(prefixes, "_TURN_S", 0.05)
    monkeypatch.setattr(prefixes, "_CLOSE_S", 0.05)
    runtime = restarted(path)
    inside, may_end = threading.Event(), threading.Event()

    def hangs(prompt):
        inside.set()
        assert may_end.wait(30)
        return runtime.compute(prompt)

    with ThreadPoolExecutor(1) as beside:
        hanging = beside.submit(runtime.prefixes.warm, 0, hangs)
        try:
            assert inside.wait(30)
            with pytest.raises(WarmError):
                runtime.prefixes.warm(1, runtime.compute)
            runtime.prefixes.close()
            assert "prefix.still-warming" in capfd.readouterr().err
            assert not hanging.done()
        finally:
            may_end.set()
        hanging.result(30)
    runtime.prefixes.close()
    assert runtime.prefixes.state is State.OFF


def test_too_large_a_pool_is_done_without(path, pool_owner):
    pool_owner.pools.max_bytes = mmap.PAGESIZE
    runtime = Runtime(path)
    runtime.prefixes.warm(0, runtime.compute)
    assert (runtime.prefixes.state, runtime.pool) == (State.OFF, None)
    runtime.warm()
    assert runtime.computed == []


def test_a_prompt_that_is_too_long_to_be_kept_is_done_without(path, pool_owner):
    runtime = restarted(path, most_blocks=1)
    assert runtime.prefixes.state is State.OFF
    runtime.warm()
    assert (runtime.computed, pool_owner.pools._pools) == ([], {})


def test_without_whole_blocks_there_is_no_pool(path, pool_owner):
    runtime = restarted(path, bundle=manifest({"short": (1, 2, 3)}))
    assert runtime.prefixes.state is State.NONE
    runtime.prefixes.warm(0, runtime.compute)
    assert (runtime.computed, pool_owner.pools._pools) == ([], {})


def test_warming_from_several_threads_fills_one_pool(path, pool_owner):
    runtime = Runtime(path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda index: runtime.prefixes.warm(index % 3, runtime.compute), range(12)))
    assert runtime.prefixes.state is State.SEALED
    assert (len(runtime.computed), pool_owner.pools.seals) == (2, 1)
    assert runtime.sound()


def test_a_client_of_another_size_is_not_believed(path):
    """The owner's descriptors are checked before they are mapped."""
    trie = PrefixTrie(PROMPTS.values(), TOKENS)
    identity = Identity(bytes(32), "0", "layout", TOKENS, 1)
    assert restore(path, Expected(FORMAT.header(0, BLOCKS), trie.encode(identity), Place())) is None
    client = PoolClient(path, Place())
    for descriptor in client.allocate(FORMAT.header(0, BLOCKS), len(metadata_of(b"", [bytes(32)] * BLOCKS))):
        os.close(descriptor)
    client.close()
