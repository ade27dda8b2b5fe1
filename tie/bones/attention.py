"""Paged attention: keys and values live in blocks of a pool, and a sequence is a table of blocks.

The pool lies as `[block][layer][K, V][kv head][token][dim]`, so that all that a block holds is one run of bytes and can
be exported or imported as such (Kwon et al. 2023, arXiv 2309.06180, for the paging itself).

`Attention` is the border behind which another kernel can stand. `GatherAttention` is the reference: it gathers each
sequence's blocks into one run and calls torch's scaled dot product attention.
"""

import itertools
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tie.bones.batch import Ints, Rows, Span
from tie.bones.config import ModelConfig
from tie.bones.errors import InputError
from tie.bones.gathered import Gathered, Held


def block_bytes(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers of a model, or of a rank's part of it."""
    return config.num_layers * 2 * config.num_kv_heads * block_tokens * config.head_dim * dtype.itemsize


class KvPool:
    """The blocks of keys and values of all sequences, zeroed at the start.

    Args:
        config: of the model.
        num_blocks: blocks in the pool.
        block_tokens: tokens that one block holds.
        dtype: of keys and values.
        memory: where they are to lie: zeroed, `num_blocks * block_bytes` long; None: anywhere.

    Raises:
        InputError: there is not a block, or a block has no token.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        memory: memoryview | mmap.mmap | None = None,
    ) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise InputError("the KV pool needs at least one block of at least one token")
        layers, heads, dim = config.num_layers, config.num_kv_heads, config.head_dim
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        shape = num_blocks, layers, 2, heads, block_tokens, dim
        if memory is None:
            self.data = torch.zeros(shape, dtype=dtype)
        else:
            self.data = torch.frombuffer(memory, dtype=dtype).view(shape)
        self.block_bytes = self.data[0].nbytes
        self._bytes = self.data.view(-1).view(torch.uint8).view(num_blocks, self.block_bytes).numpy()
        # One run per (block, layer, K or V, head), and one row per token in it. Where a view begins at the layer's own
        # first run, the same index serves every layer: no arithmetic on indices in the hot loop.
        runs, rows = self.data.view(-1, block_tokens * dim), self.data.view(-1, dim)
        self.runs_per_block = layers * 2 * heads
        self.layer_runs = [runs[layer * 2 * heads :] for layer in range(layers)]
        self.layer_rows = [rows[layer * 2 * heads * block_tokens :] for layer in range(layers)]

    def block_view(self, block: int) -> memoryview:
        """The bytes of one block over all layers, writable and in place.

        Raises:
            InputError: no such block.
        """
        if not 0 <= block < self.num_blocks:
            raise InputError("a block is outside the pool")
        return memoryview(self._bytes[block])

    def copy(self, source: int, target: int) -> None:
        """Copies all that a block holds into another."""
        self.data[target].copy_(self.data[source])

    def clear(self, blocks: Ints) -> None:
        """Zeroes blocks, so that nothing of their former sequence is left in them."""
        for block in blocks.tolist():
            self.data[block].zero_()


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows whose attention is one call.

    Attributes:
        rows: which of the batch's rows: `sequences * queries` of them; their numbers where they are not one run.
        sequences: how many sequences.
        queries: rows of each; above 1 only where there is one sequence.
        runs: `[2 * sequences * kv_heads * blocks]` int64, the runs to gather, relative to a layer's first.
        mask: what is added to the scores: 0, or minus infinity. `[sequences, 1, 1, keys]`, or `[queries, keys]`.
        held: what is kept of it from step to step, if anything is.
    """

    rows: slice | Tensor
    sequences: int
    queries: int
    runs: Tensor
    mask: Tensor
    held: Held | None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What all layers of one forward pass share: where its keys and values go, and which calls attend.

    Attributes:
        targets: `[rows * 2 * kv_heads]` int64, rows of the pool to write, relative to a layer's first.
        groups: together they cover every row once.
    """

    targets: Tensor
    groups: tuple[Group, ...]


P_contra = TypeVar("P_contra", contravariant=True)
"""What an attention prepares once for all layers of a forward pass."""


class Attention(Protocol[P_contra]):
    """Causal attention over a paged pool, as the model sees it."""

    def attend(self, plan: P_contra, layer: int, qkv: Tensor) -> Tensor:
        """Files the rows' keys and values, and attends.

        Args:
            plan: of this forward pass.
            layer: its number.
            qkv: `[rows, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values; rotated.

        Returns:
            `[rows, num_heads * head_dim]`.
        """


class GatherAttention:
    """The reference: gathers blocks and calls torch's scaled dot product attention.

    Decoding sequences share calls, padded to the longest. The heads that share a key head are rows of one small matrix
    product, so keys and values are never repeated. What was gathered for those who decode together is kept for the next
    step, up to the size of half the pool.
    """

    _PADDING = 4  # sequences share a call while the longest is at most this many times as long as the shortest

    def __init__(self, config: ModelConfig, pool: KvPool) -> None:
        self._config = config
        self._pool = pool
        self._heads = np.arange(2 * config.num_kv_heads).reshape(2, 1, config.num_kv_heads, 1)
        self._gathered = Gathered(config, pool.data.dtype, pool.data.nbytes // 2)

    def plan(self, rows: Rows) -> Plan:
        """Prepares one forward pass. Clears the blocks that this pass begins: see `_fresh_blocks`."""
        tokens = self._pool.block_tokens
        self._pool.clear(np.concatenate([_fresh_blocks(span, tokens) for span in rows.spans]))
        owners = np.concatenate([span.blocks[np.arange(span.start, span.end) // tokens] for span in rows.spans])
        runs = owners[:, None] * self._pool.runs_per_block + self._heads.reshape(1, -1)
        targets = runs * tokens + (rows.positions % tokens)[:, None]
        self._gathered.begin()
        return Plan(torch.from_numpy(targets.reshape(-1)), tuple(self._groups(rows.spans)))

    def attend(self, plan: Plan, layer: int, qkv: Tensor) -> Tensor:
        """See `Attention.attend`."""
        config = self._config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        fresh = qkv[:, heads:]
        self._pool.layer_rows[layer].index_copy_(0, plan.targets, fresh.reshape(-1, dim))
        outputs = qkv.new_empty(len(qkv), heads * dim)
        for group in plan.groups:
            queries = qkv[group.rows][:, :heads].view(-1, kv_heads, config.group_size, dim)
            keys, values = self.gather(group, layer, fresh)
            if group.queries == 1:
                out = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
                outputs[group.rows] = out.reshape(-1, heads * dim)
            else:
                # Key heads take the place of the batch, so that one mask serves all and keys are shared by stride 0.
                shape = (-1, config.group_size, -1, -1)
                keys, values = keys[0].unsqueeze(1).expand(shape), values[0].unsqueeze(1).expand(shape)
                out = scaled_dot_product_attention(queries.permute(1, 2, 0, 3), keys, values, attn_mask=group.mask)
                outputs[group.rows] = out.permute(2, 0, 1, 3).reshape(-1, heads * dim)
        return outputs

    def gather(self, group: Group, layer: int, fresh: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a group's sequences, `[sequences, kv_heads, keys, dim]` each.

        Args:
            group: of the batch.
            layer: its number.
            fresh: the batch's new rows of it, which the pool has already, `[rows, 2 * kv_heads, dim]`.
        """
        dim, held = self._config.head_dim, group.held
        if held and held.targets is not None:
            held.rows[layer].index_copy_(0, held.targets, fresh[group.rows].reshape(-1, dim))
            keys, values = held.layers[layer][..., : group.mask.shape[-1], :].unbind()
            return keys, values
        gathered = self._pool.layer_runs[layer].index_select(0, group.runs)
        gathered = gathered.view(2, group.sequences, self._config.num_kv_heads, -1, dim)
        if held:
            held.layers[layer][..., : gathered.shape[-2], :].copy_(gathered)
        keys, values = gathered.unbind()
        return keys, values

    def _groups(self, spans: Sequence[Span]) -> Iterator[Group]:
        """Groups that are kept stay as they are; the rest anew.

        Decoding spans, which come from the shortest on, together while padding stays small; any other alone.
        """
        kept = self._gathered.together(spans)
        together: list[list[int]] = []
        for place in sorted({*range(len(spans))}.difference(*kept)):
            first, span = spans[together[-1][0] if together else place], spans[place]
            limit = self._PADDING * max(first.end, self._pool.block_tokens)
            if together and first.count == span.count == 1 and span.end <= limit:
                together[-1].append(place)
            else:
                together.append([place])
        begins = list(itertools.accumulate((span.count for span in spans), initial=0))
        for places in kept + together:
            low, high = places[0], places[-1] + 1
            run = places == list(range(low, high))
            rows = slice(begins[low], begins[high]) if run else torch.tensor([begins[place] for place in places])
            yield self._group(rows, [spans[place] for place in places])

    def _group(self, rows: slice | Tensor, spans: Sequence[Span]) -> Group:
        tokens, window = self._pool.block_tokens, self._config.sliding_window
        first = [max(0, span.start + 1 - window) // tokens if window else 0 for span in spans]
        used = [span.blocks[begin : -(-span.end // tokens)] for begin, span in zip(first, spans, strict=True)]
        columns = np.arange(max(map(len, used)))
        # A short table is filled up with its own last block: another sequence never enters a sum, not even times 0.
        table = np.stack([blocks[np.minimum(columns, len(blocks) - 1)] for blocks in used])
        runs = table[None, :, None, :] * self._pool.runs_per_block + self._heads

        keys = np.array(first)[:, None, None] * tokens + np.arange(len(columns) * tokens)
        queries = np.stack([np.arange(span.start, span.end) for span in spans])[:, :, None]
        seen = keys <= queries
        if window:
            seen &= keys > queries - window
        mask = torch.zeros(seen.shape, dtype=self._pool.data.dtype)
        mask.masked_fill_(torch.from_numpy(~seen), -torch.inf)
        count = spans[0].count
        return Group(
            rows=rows,
            sequences=len(spans),
            queries=count,
            runs=torch.from_numpy(runs.reshape(-1)),
            mask=mask[:, None] if count == 1 else mask[0],
            held=self._gathered.follow(spans, mask.shape[-1]) if count == 1 else None,
        )


def _fresh_blocks(span: Span, block_tokens: int) -> Ints:
    """The blocks whose first token this span writes.

    They may still hold a former sequence's rows behind the ones written now. Those are masked, but a masked value still
    enters the sum times zero, and zero times infinity is not a number: so they are cleared.
    """
    return span.blocks[-(-span.start // block_tokens) : -(-span.end // block_tokens)]
