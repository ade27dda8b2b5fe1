"""Takes the weights over from tie-model-owner: by descriptor, sealed, mapped read-only. No weight file is opened here.

Everything that the owner says is checked before it is used: the seals and sizes of both memfds, the hash of the tensor
table, every entry of it (`tie.bones.arena`), and that the model is the one that this node's bundle describes.
"""

import hashlib
import hmac
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from kvxfer import seals
from kvxfer.doorbell import left
from tie.bones.arena import TensorEntry, byte_views
from tie.bones.errors import BonesError
from tie.daemon.errors import PeerDiedError, PeerTimeoutError, ProtocolError
from tie.proto import owner_pb2
from tie.runtime.owner_channel import OwnerChannel, close_all, translated

_RETRY_S: Final = 0.1
_MAX_TABLE_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Weights:
    """A model as the owner handed it over.

    Attributes:
        owner_instance: random per start of the owner.
        generation: counts the owner's loads.
        model: model id.
        release: of the bundle.
        config_json: the architecture, for `tie.bones.config.ModelConfig.from_json`.
        arena: the owner's memory, mapped read-only.
        entries: where each tensor lies in it, checked.
    """

    owner_instance: str
    generation: int
    model: str
    release: str
    config_json: str
    arena: mmap.mmap
    entries: tuple[TensorEntry, ...]


def attach(
    path: Path,
    layout_id: str,
    *,
    timeout: float,
    progress: Callable[[int, int], None],
    rank: int = 0,
    world_size: int = 1,
) -> Weights:
    """Attaches to the owner on `path`, waiting while it is not there yet or still loads.

    Args:
        path: owner.sock.
        layout_id: how the executor wants the weights packed.
        timeout: seconds for everything.
        progress: called with (bytes done, bytes in all) while the owner loads.
        rank: which one attaches.
        world_size: of how many.

    Raises:
        PeerTimeoutError: no owner, or not ready, within `timeout`.
        OwnerRefusedError: the owner has no such layout.
        ProtocolError: what came is not what was promised.
    """
    deadline = time.monotonic() + timeout
    attaching = owner_pb2.Attach(rank=rank, world_size=world_size, layout_id=layout_id)
    question = owner_pb2.OwnerRequest(attach=attaching)
    while (remaining := left(deadline)) > 0:  # connect takes 0 for ever
        try:
            with OwnerChannel(path, timeout=remaining) as channel:
                reply, descriptors = channel.ask(question, "attached", "loading", timeout=left(deadline))
        except PeerDiedError:
            time.sleep(_RETRY_S)  # not up yet, or restarting
            continue
        try:
            if reply.HasField("loading"):
                progress(reply.loading.bytes_done, reply.loading.bytes_total)
                time.sleep(_RETRY_S)
                continue
            if reply.attached.layout_id != layout_id:
                raise ProtocolError("model owner: another layout than asked for")
            return _take(reply.attached, descriptors)
        finally:
            close_all(descriptors)
    raise PeerTimeoutError("the model owner gave no weights within the deadline")


def _take(attached: owner_pb2.Attached, descriptors: list[int]) -> Weights:
    if attached.cuda_ipc_handle or len(descriptors) != 2:
        raise ProtocolError("model owner: expected one memfd for the arena and one for the table")
    if not 0 < attached.table_bytes <= _MAX_TABLE_BYTES or not attached.arena_bytes:
        raise ProtocolError("model owner: impossible sizes")
    with translated():
        seals.require(descriptors[0], seals.IMMUTABLE, attached.arena_bytes)
        seals.require(descriptors[1], seals.IMMUTABLE, attached.table_bytes)
    table = os.pread(descriptors[1], attached.table_bytes, 0)
    if not hmac.compare_digest(hashlib.sha256(table).digest(), attached.table_sha256):
        raise ProtocolError("model owner: the tensor table does not match its hash")
    arena = mmap.mmap(descriptors[0], attached.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    try:
        entries = _entries(table)
        byte_views(arena, entries)  # checks them
    except BonesError as error:
        raise ProtocolError(f"model owner: {error}") from None
    return Weights(
        owner_instance=attached.owner_instance,
        generation=attached.generation,
        model=attached.model,
        release=attached.release,
        config_json=attached.config_json,
        arena=arena,
        entries=entries,
    )


def _entries(table: bytes) -> tuple[TensorEntry, ...]:
    parsed = owner_pb2.TensorTable()
    try:
        parsed.ParseFromString(table)
    except DecodeError:
        raise ProtocolError("model owner: the tensor table does not parse") from None
    return tuple(
        TensorEntry(tensor.name, tensor.dtype, tuple(tensor.shape), tensor.offset, tensor.bytes)
        for tensor in parsed.tensors
    )
