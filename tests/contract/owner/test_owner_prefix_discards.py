"""A pool that is not what a runtime expects: every disagreement is injected, and nothing wrong is ever served."""

import hashlib
import mmap
import os
from dataclasses import dataclass, replace

import pytest

from kvxfer import seals
from kvxfer.header import Header
from prefix_runtime import BLOCKS, BYTES, FORMAT, PROMPTS, TOKENS, Runtime, manifest, mappings, restarted
from tie.assets.manifest import FileEntry
from tie.daemon.errors import RefusedError
from tie.proto import owner_pb2 as pb
from tie.runtime.prefix_restore import PoolDamagedError
from tie.runtime.prefixes import State


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
    "another block size": Spoilt(_edit(block_bytes=16), reason="block-bytes"),
    "more tokens in a block": Spoilt(_edit(block_tokens=8, token_count=24), reason="block-tokens"),
    "fewer blocks": Spoilt(_edit(block_count=2, token_count=8), reason="block-count"),
    "another trie": Spoilt(_attribute("trie_sha256", bytes(32)), reason="trie"),
    "another split": Spoilt(_attribute("world_size", 3), reason="world-size"),
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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", DISCARDED)
def test_a_pool_that_disagrees_is_discarded_and_computed_afresh(name, ranks, path, pool_owner, capfd):
    """The last rank's, where there are two: what is wrong with one is wrong with all."""
    spoilt = DISCARDED[name]
    restarted(path, ranks=ranks).warm()
    if spoilt.spoil:
        spoilt.spoil(pool_owner.pools._pools[ranks - 1])
    mapped = mappings()
    second = restarted(path, ranks=ranks, **(spoilt.expects or {}))
    assert f'"reason":"{spoilt.reason}"' in capfd.readouterr().err.replace(" ", "")
    assert (second.prefixes.state, second.pool) == (State.COLD, None)
    assert mappings() == mapped, "nothing was mapped, of no rank"
    assert pool_owner.pools.resets == 1
    assert pool_owner.pools._pools == {}
    if not spoilt.expects:
        second.warm()
        assert second.sound()
        assert len(second.computed) == 2
        third = restarted(path, ranks=ranks)
        assert (third.prefixes.state, third.computed) == (State.SEALED, [])
        assert third.sound()


def _filled(path, change, ranks):
    """Pools; the blocks of the last rank's are changed before it is sealed, under metadata that says otherwise."""
    runtime = Runtime(path, ranks=ranks)
    honest = runtime.prefixes._seal

    def seal(filling):
        if filling.source is runtime.parts[-1]:
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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_pool_stops_the_start_and_the_next_one_computes(name, ranks, path, pool_owner):
    _filled(path, DAMAGED[name], ranks)
    mapped = mappings()
    second = Runtime(path, ranks=ranks)
    with pytest.raises(PoolDamagedError, match="prefix pool"):
        second.prefixes.restore()
    assert second.pool is None
    assert mappings() == mapped, "all are unmapped"
    assert pool_owner.pools.resets == 1
    third = restarted(path, ranks=ranks).warm()
    assert third.sound()


def test_a_rank_that_cannot_be_sealed_leaves_no_pool_of_any(path, pool_owner):
    """Some are sealed by then: they go too, and the next warmup finds nothing."""
    runtime = Runtime(path, ranks=2)
    honest = runtime.prefixes._seal

    def seal(filling):
        if filling.source is runtime.parts[1]:
            pool_owner.pools._pools[1].holder = "another"
        honest(filling)

    runtime.prefixes._seal = seal
    with pytest.raises(RefusedError):
        runtime.warm()
    assert (runtime.prefixes.state, pool_owner.pools._pools) == (State.COLD, {})
    runtime.prefixes._seal = honest
    assert runtime.warm().sound()
