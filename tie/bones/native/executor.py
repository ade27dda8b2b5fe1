"""The native executor: a model on the compiled forward step.

The same interface as `tie.bones.executor.Executor`, with arrays for tensors: a node on this path needs no PyTorch.
"""

import ctypes
import mmap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from tie.bones.batch import Batch, as_ints
from tie.bones.blocks import HostBlocks
from tie.bones.config import ModelConfig
from tie.bones.errors import InputError, WeightsError
from tie.bones.native import library
from tie.bones.native.library import BLOCK_TOKENS
from tie.bones.native.packing import FORMATS, GROUP, PackedMatrix, PackedVector, layout
from tie.bones.native.threads import StepThreads
from tie.bones.rope import rope_frequencies

SPINS: Final = 4000
"""How often a thread that waits for the others looks before it sleeps: some tens of microseconds."""

TENSORS: Final = ("embedding", "head", "norm", "frequencies")
LAYER_TENSORS: Final = (
    "attention_norm", "qkv", "qkv_bias", "query_norm", "key_norm", "output", "output_bias", "feed_forward_norm",
    "gate_up", "down",
)  # fmt: skip
"""What the library takes of a model and then of each layer, in this order: as in api.cpp."""

LINE: Final = 64
"""Bytes of a cache line, on which packed tensors begin."""

Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class NativeExecutor(HostBlocks):
    """Runs a model with the native library.

    Args:
        config: of the model.
        tensors: packed tensors (see `packing.layout`), each one's bytes, uint8. Used where they lie and never copied.
            How a matrix is stored shows in its size.
        num_blocks: blocks of the KV pool.
        block_tokens: tokens of a block: 16.
        threads: that work on a step, the caller's among them.
        adapt: take fewer of them where that is faster, and leave one core where many are served; see `threads.py`.
        weights: what was asked of the owner, for the name of the layout.
        level: instruction set, a key of `library.LEVELS`; None: the best.

    Raises:
        InputError: an argument is impossible, or the model's shape is not supported.
        WeightsError: the tensors are not those of the model.
        OSError: there is no native library for this machine.
    """

    vision = None  # models that take images are PyTorch's

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Bytes],
        *,
        num_blocks: int,
        block_tokens: int,
        threads: int,
        adapt: bool = False,
        weights: str = "auto",
        level: str | None = None,
    ) -> None:
        if block_tokens != BLOCK_TOKENS:
            raise InputError(f"the native executor's blocks have {BLOCK_TOKENS} tokens")
        if num_blocks < 1:
            raise InputError("the KV pool needs at least one block")
        self.config = config
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.level = library.choose(level)
        self._library = library.load(self.level)
        self.name = f"native-{self.level}"
        self.layout_id = f"native-{weights}"
        self._engine = ctypes.c_void_p()
        shape = library.Shape(
            config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads, config.num_kv_heads,
            config.head_dim, config.vocab_size, config.context_tokens, config.sliding_window or 0,
            config.rms_norm_eps,
        )  # fmt: skip
        self.block_bytes = self._library.tie_native_block_bytes(ctypes.byref(shape), ctypes.sizeof(shape))
        if not self.block_bytes:
            raise InputError("the model's shape is not one that the native library can run")
        self._weights, raw = _weights(config, tensors)  # what the engine points to; and where
        # Anonymous memory: zero, on pages of its own, and taken from the machine only when it is first written.
        # In huge pages where the kernel has them: a step reads all of a sequence's blocks, an import writes them.
        self._pool = mmap.mmap(-1, num_blocks * self.block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel that has none
            self._pool.madvise(mmap.MADV_HUGEPAGE)
        pool = np.frombuffer(self._pool, np.uint8)
        _check(
            self._library.tie_native_new(
                ctypes.byref(shape), ctypes.sizeof(shape), raw, len(raw), pool.ctypes.data, pool.nbytes, threads, SPINS,
                ctypes.byref(self._engine),
            )
        )  # fmt: skip
        self._threads = StepThreads(threads, adapt=adapt)

    def __del__(self) -> None:
        """Ends the threads."""
        if getattr(self, "_engine", None):
            self._library.tie_native_free(self._engine)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.config.vocab_size

    def block_view(self, block: int) -> memoryview:
        """The bytes of one block, in place and writable: to export it, or to import one. Laid out as model.h says.

        Raises:
            InputError: no such block.
        """
        if not 0 <= block < self.num_blocks:
            raise InputError("a block is outside the pool")
        return memoryview(self._pool)[block * self.block_bytes : (block + 1) * self.block_bytes]

    def forward(self, batch: Batch) -> Floats:
        """Computes a batch: copies blocks, files keys and values of every row, returns the logits that are asked for.

        Returns:
            `[sum of slice.logits, vocab_size]`, in batch order.

        Raises:
            InputError: the batch cannot be carried out; nothing was changed.
        """
        slices = batch.slices
        tokens = [as_ints(item.tokens) for item in slices]
        tables = [as_ints(item.blocks) for item in slices]
        counts, table_sizes = _numbers([len(ids) for ids in tokens]), _numbers([len(table) for table in tables])
        starts, wanted = _numbers([item.start for item in slices]), _numbers([item.logits for item in slices])
        all_tokens, all_blocks = _joined(tokens), _joined(tables)
        copies = _numbers(batch.copies)
        rows = int(wanted.sum())
        if not 0 <= rows <= len(all_tokens):
            rows = 0  # some slice asks for an impossible number, and will be refused for it
        logits = np.empty((rows, self.vocab_size), dtype=np.float32)
        threads = self._threads.choose(len(slices), len(all_tokens))
        raw = library.RawBatch(
            counts.ctypes.data, starts.ctypes.data, table_sizes.ctypes.data, wanted.ctypes.data,
            all_tokens.ctypes.data, all_blocks.ctypes.data, copies.ctypes.data, logits.ctypes.data,
            len(slices), len(all_tokens), len(all_blocks), len(batch.copies), rows,
            threads,
        )  # fmt: skip
        began = time.perf_counter()
        _check(self._library.tie_native_step(self._engine, ctypes.byref(raw), ctypes.sizeof(raw)))
        self._threads.record(len(slices), len(all_tokens), threads, time.perf_counter() - began)
        return logits


def _weights(config: ModelConfig, tensors: Mapping[str, Bytes]) -> tuple[list[Array], ctypes.Array[library.Tensor]]:
    """All tensors, and where they lie, in the library's order."""
    found = {item.name: _tensor(item, tensors.get(item.name)) for item in layout(config, "bf16")}
    if extra := len(tensors.keys() - found.keys()):
        raise WeightsError(f"there are {extra} tensors that a model of this configuration does not have")
    frequencies = _on_a_line(rope_frequencies(config))
    found["frequencies"] = library.Tensor(frequencies.ctypes.data, frequencies.nbytes, 0)
    if config.tie_word_embeddings:
        found["head"] = found["embedding"]
    names = [*TENSORS, *(f"layers.{n}.{name}" for n in range(config.num_layers) for name in LAYER_TENSORS)]
    raw = (library.Tensor * len(names))(*(found.get(name, library.Tensor()) for name in names))
    return [*tensors.values(), frequencies], raw


def _tensor(item: PackedMatrix | PackedVector, data: Bytes | None) -> library.Tensor:
    if data is None:
        raise WeightsError(f"the tensor {item.name} is missing")
    stored = item.weights_of(data.nbytes)
    if stored is None or data.ctypes.data % LINE or not data.flags.c_contiguous:
        raise WeightsError(f"the tensor {item.name} has another size or alignment than the model needs")
    return library.Tensor(data.ctypes.data, data.nbytes, FORMATS[stored])


def _on_a_line(values: Floats) -> Floats:
    """A vector as packed ones are: padded with zeros, and from a cache line on."""
    room = np.zeros(-(-len(values) // GROUP) * GROUP + LINE // 4, dtype=np.float32)
    line = room[-room.ctypes.data % LINE // 4 :][: len(room) - LINE // 4]
    line[: len(values)] = values
    return line


def _check(problem: bytes | None) -> None:
    if problem is not None:
        raise InputError(problem.decode())


def _numbers(values: Sequence[int] | Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    try:
        return np.array(values, dtype=np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError("lengths and positions must be whole numbers of ordinary size") from error


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
