"""Bundle → arena: reads every weight once, checks the hashes meanwhile, and packs the tensors for one layout."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from model_owner.arena import ALIGNMENT, Arena, CpuArena, CudaArena, sealed_copy
from tie.assets.bundle import Bundle
from tie.assets.tensors import Float32, Raw, StoredTensor, load_index, read_rows
from tie.daemon.errors import BundleError, TieError
from tie.proto import owner_pb2

_PIECE_VALUES: Final = 1 << 18  # values converted at a time: source, float32 and result stay in the cache
_HASH_CHUNK: Final = 16 * 1024 * 1024
_WIDTH: Final = {"f32": 4, "bf16": 2}

Words = npt.NDArray[np.uint16]


class CancelledError(TieError):
    """The owner is shutting down in the middle of a load."""


@dataclass(frozen=True)
class Layout:
    """One way to pack the weights. Matrices and biases have `dtype`; norms are always float32."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["f32", "bf16"]


LAYOUTS: Final[Mapping[str, Layout]] = {
    "torch-cpu-f32": Layout("cpu", "f32"),
    "torch-cpu-bf16": Layout("cpu", "bf16"),
    "torch-cuda-f32": Layout("cuda", "f32"),
    "torch-cuda-bf16": Layout("cuda", "bf16"),
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
    tensors = load_index(bundle).tensors
    table, size = _plan(tensors, layout)
    files = {name: _map(bundle, name) for name in bundle.manifest.weights}
    arena: Arena = CudaArena(size) if layout.device == "cuda" else CpuArena(size)
    stop = threading.Event()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="weight-hash") as hasher:
            try:
                # Beside the conversion: hashlib leaves the interpreter lock to it.
                hashes = {name: hasher.submit(_hash, data, on_read, stop) for name, data in files.items()}
                for tensor, entry in zip(tensors, table.tensors, strict=True):
                    raw = files[tensor.file][tensor.offset : tensor.offset + tensor.bytes]
                    _convert(tensor, raw, arena, entry, cancelled)
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


def _plan(tensors: Iterable[StoredTensor], layout: Layout) -> tuple[owner_pb2.TensorTable, int]:
    """The table of the arena, tensors in the order of the files, and the arena's size."""
    table = owner_pb2.TensorTable()
    offset = 0
    for tensor in tensors:
        dtype = "f32" if tensor.name.endswith("norm.weight") else layout.dtype
        size = tensor.rows * tensor.columns * _WIDTH[dtype]
        table.tensors.add(name=tensor.name, dtype=dtype, shape=tensor.shape, offset=offset, bytes=size)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
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


def _convert(tensor: StoredTensor, raw: Raw, arena: Arena, entry: owner_pb2.Tensor, cancelled: threading.Event) -> None:
    row_bytes = tensor.columns * _WIDTH[entry.dtype]
    step = max(1, _PIECE_VALUES // tensor.columns)
    for start in range(0, tensor.rows, step):
        if cancelled.is_set():
            raise CancelledError("shutting down")
        stop = min(start + step, tensor.rows)
        values = read_rows(tensor, raw, start, stop)
        if not np.isfinite(values).all():
            raise BundleError(f"tensor {tensor.name} holds values that are not finite")
        with arena.piece(entry.offset + start * row_bytes, (stop - start) * row_bytes) as piece:
            _store(values, piece, entry.dtype)


def _store(values: Float32, piece: memoryview, dtype: str) -> None:
    if dtype == "bf16":
        round_to_bf16(values, np.frombuffer(piece, np.uint16))
    else:
        np.copyto(np.frombuffer(piece, np.float32), values.reshape(-1))


def round_to_bf16(values: Float32, out: Words) -> None:
    """Rounds to the nearest bfloat16, ties to even.

    Args:
        values: finite, any shape.
        out: as many 16-bit words; gets the upper halves of the rounded float32.
    """
    bits = values.reshape(-1).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    np.copyto(out, rounded, casting="unsafe")
