"""The executor: a model, its KV pool, and one forward pass per scheduled batch.

Not thread-safe: one thread schedules and calls.
"""

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from tie.bones.attention import GatherAttention, KvPool, Plan
from tie.bones.batch import Batch, SequenceSlice, lay_out
from tie.bones.blocks import HostBlocks
from tie.bones.config import ModelConfig
from tie.bones.errors import InputError
from tie.bones.llama import Llama
from tie.bones.split import ALONE, Split
from tie.bones.vision.encoder import VisionEncoder

__all__ = ["DTYPES", "Batch", "Executor", "SequenceSlice"]

DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16}


class Executor(HostBlocks):
    """Runs a model with PyTorch on the CPU.

    Args:
        config: of the model.
        tensors: the weights, under Hugging Face's names, packed for the layout `torch-cpu-<dtype>`: matrices of
            `dtype`, vectors of any floating dtype. Matrices are used where they lie and never copied.
        num_blocks: blocks of the KV pool.
        block_tokens: tokens of a block.
        dtype: "f32" or "bf16": of weights, keys and values.
        threads: of PyTorch, for the whole process.
        split: which part of the model this is; `tie.bones.parallel` puts the parts together.
        reduce: sums what the shards of a layer have each computed of it; None: there is one.
        memory: of the KV pool, `num_blocks * attention.block_bytes` zeros; None: its own.

    Attributes:
        vision: encodes images for models that take them, else None. Another thread may use it beside `forward`.

    Raises:
        ConfigError: the model cannot be split so.
        InputError: an argument is impossible.
        WeightsError: the tensors are not those of the model.
    """

    name = "torch-cpu"

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: str,
        threads: int,
        split: Split = ALONE,
        reduce: Callable[[Tensor], Tensor] | None = None,
        memory: memoryview | mmap.mmap | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise InputError(f"the dtype must be one of {', '.join(DTYPES)}")
        if threads < 1:
            raise InputError("at least one thread is needed")
        torch.set_num_threads(threads)
        self.config = config
        self.layout_id = f"{self.name}-{dtype}{split.suffix}"
        part = split.config(config)
        self._pool = KvPool(part, num_blocks=num_blocks, block_tokens=block_tokens, dtype=DTYPES[dtype], memory=memory)
        self._attention = GatherAttention(part, self._pool)
        self._model = Llama(config, tensors, self._attention, DTYPES[dtype], split=split, reduce=reduce)
        self.vision = VisionEncoder(config.vision, tensors, DTYPES[dtype]) if config.vision else None

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.config.vocab_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool."""
        return self._pool.num_blocks

    @property
    def block_tokens(self) -> int:
        """Tokens that a block holds."""
        return self._pool.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes that a block takes, over all layers."""
        return self._pool.block_bytes

    def block_view(self, block: int) -> memoryview:
        """The bytes of one block, in place and writable: to export it, or to import one.

        Laid out as `[layer][K, V][kv head][token][dim]`.

        Raises:
            InputError: no such block.
        """
        return self._pool.block_view(block)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Computes a batch: copies blocks, files keys and values of every row, returns the logits that are asked for.

        Logits of one sequence depend on the rest of the batch by rounding only: the matrix products sum in an order
        that depends on how many rows there are.

        Returns:
            `[sum of slice.logits, vocab_size]` float32, in batch order.

        Raises:
            InputError: the batch cannot be carried out; nothing was changed.
        """
        rows = lay_out(batch, self.config, num_blocks=self.num_blocks, block_tokens=self.block_tokens)
        self._begin(batch)
        with torch.inference_mode():
            for source, target in batch.copies:
                self._pool.copy(source, target)
            plan = self._attention.plan(rows)
            tokens, positions = torch.from_numpy(rows.tokens), torch.from_numpy(rows.positions)
            given = [(first, torch.from_numpy(vectors)) for first, vectors in rows.given]
            return self._run(tokens, positions, torch.from_numpy(rows.wanted), plan, given)

    def _begin(self, batch: Batch) -> None:
        """A batch that has been checked is about to be computed."""

    def _run(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, plan: Plan, given: Sequence[tuple[int, Tensor]]
    ) -> Tensor:
        """The logits of a batch's rows: `Llama.forward`, wherever its layers are."""
        return self._model.forward(tokens, positions, wanted, plan, given)
