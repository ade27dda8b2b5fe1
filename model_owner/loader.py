"""Bundle → arena: reads every weight once, checks the hashes meanwhile, and packs the tensors for one layout."""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from model_owner import native, plain
from model_owner.arena import ALIGNMENT, Arena, CpuArena, CudaArena, sealed_copy
from model_owner.source import CancelledError, Packed, Source
from tie.assets.bundle import Bundle
from tie.assets.tensors import Raw, load_index
from tie.bones.native.packing import Weights
from tie.daemon.errors import BundleError
from tie.proto import owner_pb2

_HASH_CHUNK: Final = 16 * 1024 * 1024


@dataclass(frozen=True)
class Layout:
    """One way to pack the weights.

    Attributes:
        device: where.
        plan: the packed tensors of a bundle, in their order in the arena.
    """

    device: Literal["cpu", "cuda"]
    plan: Callable[[Source, Bundle], Sequence[Packed]]


def _plain(dtype: plain.Dtype) -> Callable[[Source, Bundle], Sequence[Packed]]:
    return lambda source, _: plain.plan(source, dtype)


def _native(weights: Weights | Literal["auto"]) -> Callable[[Source, Bundle], Sequence[Packed]]:
    def planned(source: Source, bundle: Bundle) -> Sequence[Packed]:
        architecture = bundle.manifest.architecture
        if architecture.vision:  # which the native step does not compute: PyTorch takes its place
            return plain.plan(source, "bf16")
        return native.plan(architecture, native.as_stored(source) if weights == "auto" else weights)

    return planned


LAYOUTS: Final[Mapping[str, Layout]] = {
    "torch-cpu-f32": Layout("cpu", _plain("f32")),
    "torch-cpu-bf16": Layout("cpu", _plain("bf16")),
    "torch-cuda-f32": Layout("cuda", _plain("f32")),
    "torch-cuda-bf16": Layout("cuda", _plain("bf16")),
    "cuda-bf16": Layout("cpu", _plain("bf16")),  # which the executor copies to its GPU when it starts
    "native-auto": Layout("cpu", _native("auto")),
    "native-q4": Layout("cpu", _native("q4")),
    "native-q8": Layout("cpu", _native("q8")),
    "native-bf16": Layout("cpu", _native("bf16")),
}


@dataclass(frozen=True)
class PackedWeights:
    """A sealed arena with its table.

    Attributes:
        layout_id: a key of LAYOUTS.
        arena: sealed.
        table: serialized TensorTable.
        table_descriptor: read-only memfd with the same bytes.
    """

    layout_id: str
    arena: Arena
    table: bytes
    table_descriptor: int

    @property
    def table_sha256(self) -> bytes:
        """Of `table`, 32 bytes."""
        return hashlib.sha256(self.table).digest()

    def close(self) -> None:
        """Gives arena and table up."""
        self.arena.close()
        os.close(self.table_descriptor)


def pack(
    bundle: Bundle, layout_id: str, *, on_read: Callable[[int], None], cancelled: threading.Event
) -> PackedWeights:
    """Packs a bundle's weights.

    Args:
        bundle: the model.
        layout_id: a key of LAYOUTS.
        on_read: is told of bytes read from weight files, from another thread.
        cancelled: ends the work early.

    Raises:
        BundleError: the bundle is damaged: the arena is thrown away, whatever was already converted.
        ArenaError: no memory or no GPU.
        CancelledError: `cancelled` was set.
    """
    layout = LAYOUTS[layout_id]
    files = {name: _map(bundle, name) for name in bundle.manifest.weights}
    source = Source(load_index(bundle).tensors, files, cancelled)
    items = layout.plan(source, bundle)
    table, size = _table(items)
    arena: Arena = CudaArena(size) if layout.device == "cuda" else CpuArena(size)
    stop = threading.Event()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="weight-hash") as hasher:
            try:
                # Beside the conversion: hashlib leaves the interpreter lock to it.
                hashes = {name: hasher.submit(_hash, data, on_read, stop) for name, data in files.items()}
                for item, entry in zip(items, table.tensors, strict=True):
                    item.fill(source, arena, entry.offset)
                for name, future in hashes.items():
                    while not future.done():
                        if cancelled.wait(0.02):
                            raise CancelledError("shutting down")
                    if future.result() != bundle.manifest.files[name].sha256:
                        raise BundleError(f"{bundle.path(name)}: not what the manifest says")
            finally:
                stop.set()
        arena.seal()
        serialized = table.SerializeToString(deterministic=True)
        return PackedWeights(layout_id, arena, serialized, sealed_copy("tie-tensor-table", serialized))
    except BaseException:
        arena.close()
        raise


def _table(items: Sequence[Packed]) -> tuple[owner_pb2.TensorTable, int]:
    """The table of the arena, and the arena's size."""
    table = owner_pb2.TensorTable()
    offset = 0
    for item in items:
        table.tensors.add(name=item.name, dtype=item.dtype, shape=item.shape, offset=offset, bytes=item.bytes)
        offset += -(-item.bytes // ALIGNMENT) * ALIGNMENT
    return table, offset


def _map(bundle: Bundle, name: str) -> Raw:
    path = bundle.path(name)
    try:
        data = np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error
    if data.size != bundle.manifest.files[name].bytes:
        raise BundleError(f"{path}: not what the manifest says")
    return data


def _hash(data: Raw, on_read: Callable[[int], None], stop: threading.Event) -> str:
    digest = hashlib.sha256()
    for start in range(0, data.size, _HASH_CHUNK):
        if stop.is_set():
            break
        chunk = data[start : start + _HASH_CHUNK]
        digest.update(chunk.data)
        on_read(chunk.size)
    return digest.hexdigest()
