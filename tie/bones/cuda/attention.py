"""The border behind which a kernel for paged attention stands, and what is the same for all of them."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tie.bones.config import ModelConfig
from tie.bones.cuda.numbers import Inputs, PageTable
from tie.bones.cuda.pool import DevicePool


class Attend(Protocol):
    """Attention of one pass's rows, each to its own sequence up to itself; planned once for all layers."""

    def __call__(self, queries: Tensor, cache: Tensor) -> Tensor:
        """Attends.

        Args:
            queries: `[rows, num_heads, head_dim]`.
            cache: a layer's keys and values (`DevicePool.layers`), the pass's own rows among them.

        Returns:
            `[rows, num_heads, head_dim]`.
        """
        ...


class Decoder(Attend, Protocol):
    """The same for a number of decoding sequences that never changes, in memory that never moves.

    What `attend` does with the device is the same in every pass, so that it can be captured; only what lies in the
    memory differs, and `update` puts it there.
    """

    def update(self, table: PageTable, pages: Tensor) -> None:
        """Prepares the next pass: as many sequences as ever, of one row each. Takes what `Kernel.plan` takes."""
        ...


class Kernel(Protocol):
    """An implementation of paged attention."""

    def plan(self, table: PageTable, pages: Tensor) -> Attend:
        """Prepares one pass.

        Args:
            table: its sequences.
            pages: `table.pages` on the device, int32.
        """
        ...

    def decoder(self, sequences: int, most_pages: int) -> Decoder:
        """A decoder for so many sequences, of at most so many pages each."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One forward pass, as the layers see it."""

    inputs: Inputs
    attend: Attend


class PagedAttention:
    """`tie.bones.attention.Attention` over a pool on a device, with any kernel.

    Args:
        config: of the model.
        pool: its keys and values.
    """

    def __init__(self, config: ModelConfig, pool: DevicePool) -> None:
        self._heads = config.num_heads
        self._pool = pool

    def attend(self, plan: Pass, layer: int, qkv: Tensor) -> Tensor:
        """See `tie.bones.attention.Attention`."""
        self._pool.file(layer, plan.inputs, qkv[:, self._heads :])
        return plan.attend(qkv[:, : self._heads].contiguous(), self._pool.layers[layer]).flatten(1)
