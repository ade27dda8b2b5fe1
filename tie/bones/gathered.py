"""Keys and values of sequences that decode together, kept gathered from one step to the next.

Where the same sequences decode in step after step, only one row of each is new: it is added, and nothing is gathered.
They stay together while all of them decode, whoever else does: others form groups of their own.

What is kept is a copy; the pool stays complete. It is used only where the slices' residence numbers prove that it is
still what the pool holds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tie.bones.batch import Span
from tie.bones.config import ModelConfig

_PATIENCE = 4  # times in a row that the same sequences decode together before anything is kept: to begin costs much
_GROWTH = 64  # tokens of room for what comes; when it is used up, everything is gathered once more


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A group's keys and values.

    Attributes:
        layers: `[2, sequences, kv_heads, capacity, dim]` of each layer: keys, values.
        rows: the same as `[rows, dim]`.
        targets: `[sequences * 2 * kv_heads]` int64, where the new rows go; None: nothing is there yet.
    """

    layers: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    targets: Tensor | None


@dataclass(slots=True, eq=False)
class _Entry:
    ends: tuple[int, ...]
    times: int
    memory: Tensor | None  # flat
    storage: Tensor | None  # the begin of it, [layers, 2, sequences, kv_heads, capacity, dim]


class Gathered:
    """What is kept between two steps.

    Args:
        config: of the model.
        dtype: of keys and values.
        most_bytes: nothing is kept beyond.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, most_bytes: int) -> None:
        self._config = config
        self._dtype = dtype
        self._most_bytes = most_bytes
        self._entries: dict[tuple[int, ...], _Entry] = {}
        self._next: dict[tuple[int, ...], _Entry] = {}
        self._bytes = 0
        self._spare: Tensor | None = None  # of what was let go: to touch new pages costs more than to fill them

    def begin(self) -> None:
        """A forward pass begins. What the last one did not use is let go."""
        for entry in self._entries.values():
            self._let_go(entry.memory)
        self._entries, self._next = self._next, {}
        self._bytes = sum(entry.memory.nbytes for entry in self._entries.values() if entry.memory is not None)

    def together(self, spans: Sequence[Span]) -> list[list[int]]:
        """The groups that are kept and can stay as they are: places of their sequences in `spans`."""
        places = {span.residence: place for place, span in enumerate(spans) if span.count == 1}
        groups = []
        for key, entry in self._entries.items():
            if entry.storage is None:
                continue
            group = [places[residence] for residence in key if residence in places]
            if len(group) == len(key) and all(
                spans[place].start == end for place, end in zip(group, entry.ends, strict=True)
            ):
                groups.append(group)
        return groups

    def follow(self, spans: Sequence[Span], length: int) -> Held | None:
        """What is kept of a group of decoding spans, or will be from now on; None: it is to be gathered.

        Args:
            spans: of one row each.
            length: keys that the group attends to, padding included.
        """
        if self._config.sliding_window or any(span.residence is None for span in spans):
            return None
        key = tuple(span.residence for span in spans if span.residence is not None)
        known = self._entries.pop(key, None)
        memory = storage = targets = None
        times = 1
        if known is not None and known.ends == tuple(span.start for span in spans):
            memory, storage, times = known.memory, known.storage, known.times + 1
            if storage is not None and length <= storage.shape[-2]:
                targets = self._targets(spans, storage.shape[-2])
            elif times >= _PATIENCE:
                self._let_go(memory)
                memory, storage = self._allocate(len(spans), length)
        elif known is not None:
            self._let_go(known.memory)
        self._next[key] = _Entry(tuple(span.end for span in spans), times, memory, storage)
        if storage is None:
            return None
        layers = storage.unbind()
        return Held(layers, tuple(layer.view(-1, layer.shape[-1]) for layer in layers), targets)

    def _let_go(self, memory: Tensor | None) -> None:
        if memory is None:
            return
        self._bytes -= memory.nbytes
        if self._spare is None or memory.numel() > self._spare.numel():
            self._spare = memory

    def _allocate(self, sequences: int, length: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Memory, and what is kept in it, all zero beyond `length`: what is masked still enters sums, times 0."""
        config = self._config
        shape = (config.num_layers, 2, sequences, config.num_kv_heads, length + _GROWTH, config.head_dim)
        count = math.prod(shape)
        most = (self._most_bytes - self._bytes) // self._dtype.itemsize
        if count > most:
            return None, None
        memory, self._spare = self._spare, None
        if memory is None or not count <= memory.numel() <= most:
            memory = torch.empty(min(2 * count, most), dtype=self._dtype)  # pages that are not touched cost nothing
        self._bytes += memory.nbytes
        storage = memory[:count].view(shape)
        storage[..., length:, :].zero_()
        return memory, storage

    def _targets(self, spans: Sequence[Span], capacity: int) -> Tensor:
        kv_heads = self._config.num_kv_heads
        kinds = np.arange(2)[None, :, None] * len(spans) * kv_heads
        sequences = np.arange(len(spans))[:, None, None] * kv_heads
        starts = np.array([span.start for span in spans])[:, None, None]
        return torch.from_numpy(((kinds + sequences + np.arange(kv_heads)) * capacity + starts).reshape(-1))
