"""Manifests: what is written is what is read, for the format that is wanted and no other."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tie.warden.errors import EntryError
from tie.warden.manifest import CacheFormat, Manifest, Segment

FORMAT = CacheFormat("example-7b", "2026-01", "torch-cpu-f32", 4, 1000)
HEAD = Manifest(
    FORMAT, 0, tuple(range(12)), (Segment(b"i" * 32, 2, b"h" * 32), Segment(b"j" * 32, 1, b"k" * 32)), b"p" * 32
)
# protobuf: fields in order, token ids as packed fixed32.
GOLDEN = (
    "0a0a6578616d706c652d37621207323032362d30311a0d746f7263682d6370752d663332200428e8073a300000000001"
    "00000002000000030000000400000005000000060000000700000008000000090000000a0000000b0000004220707070"
    "70707070707070707070707070707070707070707070707070707070704a460a20696969696969696969696969696969"
    "696969696969696969696969696969696910021a20686868686868686868686868686868686868686868686868686868"
    "68686868684a460a206a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a6a10011a206b6b6b"
    "6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b"
)


def test_golden_vector():
    assert HEAD.encode().hex() == GOLDEN
    assert Manifest.decode(bytes.fromhex(GOLDEN), FORMAT) == HEAD


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=10), st.integers(0, 1000))
def test_a_manifest_survives(ids, block):
    segment = Manifest(FORMAT, block * 4, tuple(ids) * 4)
    assert Manifest.decode(segment.encode(), FORMAT) == segment
    assert segment.block_count == len(ids)


@pytest.mark.parametrize(
    "change",
    [{"model": "other"}, {"release": "2026-02"}, {"layout": "torch-cpu-bf16"}, {"block_tokens": 2}, {"block_bytes": 1}],
)
def test_another_format_is_refused(change):
    with pytest.raises(EntryError):
        Manifest.decode(HEAD.encode(), dataclasses.replace(FORMAT, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"first_token": 2},
        {"token_ids": ()},
        {"token_ids": tuple(range(11))},
        {"token_ids": tuple(range(16))},
        {"segments": (Segment(b"i" * 31, 3, b"h" * 32),)},
        {"segments": (Segment(b"i" * 32, 3, b"h" * 31),)},
        {"segments": (Segment(b"i" * 32, 3, b"h" * 32), Segment(b"j" * 32, 0, b"h" * 32))},
        {"prefix_sha256": b"short"},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change):
    with pytest.raises(EntryError):
        Manifest.decode(dataclasses.replace(HEAD, **change).encode(), FORMAT)


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(data):
    with pytest.raises(EntryError):
        Manifest.decode(data, FORMAT)
