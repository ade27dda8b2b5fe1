"""Attaching to a model owner that is late, refuses, or lies: each is told apart, and nothing unchecked is mapped."""

import hashlib
import mmap
import os
import threading
from contextlib import contextmanager

import pytest

from descriptors import open_descriptors
from kvxfer import seals
from kvxfer.channel import Channel, listen
from kvxfer.errors import KvxferError
from tie.bones.arena import tensor_views
from tie.daemon.errors import PeerTimeoutError, ProtocolError, RefusedError
from tie.proto import owner_pb2
from tie.runtime.owner_client import attach

LAYOUT = "torch-cpu-f32"
WAIT_S = 10.0


def memfd(data: bytes, with_seals: int = seals.IMMUTABLE) -> int:
    descriptor = seals.create("test", len(data))
    os.pwrite(descriptor, data, 0)
    if with_seals:
        seals.add(descriptor, with_seals)
    return descriptor


def table(**fields) -> bytes:
    entry = {"name": "a", "dtype": "f32", "shape": [4], "offset": 0, "bytes": 16} | fields
    return owner_pb2.TensorTable(tensors=[owner_pb2.Tensor(**entry)]).SerializeToString()


def attached(data: bytes, **fields) -> owner_pb2.OwnerReply:
    values = {
        "model": "m",
        "layout_id": LAYOUT,
        "generation": 1,
        "arena_bytes": mmap.PAGESIZE,
        "table_bytes": len(data),
        "table_sha256": hashlib.sha256(data).digest(),
    }
    return owner_pb2.OwnerReply(attached=owner_pb2.Attached(**(values | fields)))


@contextmanager
def owner(tmp_path, *replies):
    """An owner that gives one scripted reply per connection: (message or bytes, descriptors)."""
    path = tmp_path / "o.sock"
    listener = listen(path)

    def serve():
        for reply, descriptors in replies:
            connection, _ = listener.accept()
            with Channel(connection) as channel:
                channel.receive(timeout=WAIT_S)
                payload = reply if isinstance(reply, bytes) else reply.SerializeToString()
                channel.send(payload, descriptors, timeout=WAIT_S)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield path
    finally:
        thread.join(WAIT_S)
        listener.close()
        for _, descriptors in replies:
            for descriptor in descriptors:
                os.close(descriptor)


def take(path, seen=None):
    return attach(path, LAYOUT, timeout=WAIT_S, progress=lambda *done: seen.append(done) if seen is not None else None)


def test_waits_while_the_owner_loads_and_then_maps_without_a_copy(tmp_path):
    arena = memfd(b"\x00\x00\x80\x3f" * 4 + bytes(mmap.PAGESIZE - 16))
    good = table()
    loading = owner_pb2.OwnerReply(loading=owner_pb2.Loading(bytes_done=1, bytes_total=2))
    seen = []
    with owner(tmp_path, (loading, []), (attached(good), [arena, memfd(good)])) as path:
        weights = take(path, seen)
    assert seen == [(1, 2)]
    assert tensor_views(weights.arena, weights.entries)["a"].tolist() == [1.0] * 4
    assert (weights.model, weights.generation) == ("m", 1)


def test_nobody_there_is_a_timeout(tmp_path):
    with pytest.raises(PeerTimeoutError):
        attach(tmp_path / "none.sock", LAYOUT, timeout=0.3, progress=lambda *_: None)


def test_an_owner_that_does_not_answer_is_a_timeout(tmp_path):
    path = tmp_path / "o.sock"
    with listen(path), pytest.raises(PeerTimeoutError):
        attach(path, LAYOUT, timeout=0.3, progress=lambda *_: None)


def test_all_steps_share_one_deadline(tmp_path, monkeypatch):
    """Each waits for what the one before it has left."""
    allowed = []

    def noting(step):
        def noted(*arguments, **keywords):
            if threading.current_thread() is threading.main_thread():
                allowed.append(keywords["timeout"])
            return step(*arguments, **keywords)

        return noted

    for name in ("connect", "send", "receive"):
        monkeypatch.setattr(Channel, name, noting(getattr(Channel, name)))
    refused = owner_pb2.OwnerReply(refused=owner_pb2.Refused(reason="unknown-layout"))
    with owner(tmp_path, (refused, [])) as path, pytest.raises(RefusedError):
        take(path)
    connecting, sending, receiving = allowed
    assert WAIT_S >= connecting > sending > receiving


def test_a_refusal_has_its_reason(tmp_path):
    refused = owner_pb2.OwnerReply(refused=owner_pb2.Refused(reason="unknown-layout"))
    with owner(tmp_path, (refused, [])) as path, pytest.raises(RefusedError, match="unknown-layout"):
        take(path)


GOOD = table()
PAGE = bytes(mmap.PAGESIZE)


@pytest.mark.parametrize(
    ("reply", "arena", "data", "with_seals"),
    [
        (b"\xff\xff", PAGE, GOOD, seals.IMMUTABLE),
        (b"\x20\x01", PAGE, GOOD, seals.IMMUTABLE),
        (attached(GOOD, layout_id="other"), PAGE, GOOD, seals.IMMUTABLE),
        (attached(GOOD), PAGE, GOOD, seals.FIXED),
        (attached(GOOD), PAGE, GOOD, 0),
        (attached(GOOD, arena_bytes=2 * mmap.PAGESIZE), PAGE, GOOD, seals.IMMUTABLE),
        (attached(GOOD, arena_bytes=0), PAGE, GOOD, seals.IMMUTABLE),
        (attached(GOOD, table_bytes=2**40), PAGE, GOOD, seals.IMMUTABLE),
        (attached(GOOD, table_sha256=bytes(32)), PAGE, GOOD, seals.IMMUTABLE),
        (attached(table(offset=mmap.PAGESIZE)), PAGE, table(offset=mmap.PAGESIZE), seals.IMMUTABLE),
        (attached(table(dtype="f64")), PAGE, table(dtype="f64"), seals.IMMUTABLE),
        (attached(b"\xff\xff"), PAGE, b"\xff\xff", seals.IMMUTABLE),
        (attached(GOOD, cuda_ipc_handle=b"x"), PAGE, GOOD, seals.IMMUTABLE),
    ],
    ids=[
        "not-a-reply", "unknown", "other-layout", "writable", "unsealed", "shorter", "nothing", "huge-table",
        "wrong-hash", "outside", "unknown-dtype", "not-a-table", "cuda",
    ],
)  # fmt: skip
def test_what_was_not_promised_is_not_mapped(tmp_path, reply, arena, data, with_seals):
    before = open_descriptors()
    descriptors = [memfd(arena, with_seals), memfd(data, with_seals)]
    with owner(tmp_path, (reply, descriptors)) as path, pytest.raises(ProtocolError):
        take(path)
    assert open_descriptors() == before


def test_missing_descriptors_are_noticed(tmp_path):
    with owner(tmp_path, (attached(GOOD), [])) as path, pytest.raises(ProtocolError):
        take(path)


def test_a_kvxfer_error_never_leaves_as_such():
    assert not issubclass(ProtocolError, KvxferError)
