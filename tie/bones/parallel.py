"""One rank's share of a forward step, and what it exchanges with the others, over `torch.distributed`'s gloo.

Every rank gets the same batches in the same order, and computes its part (`split`) on KV blocks of its own:

    first stage   embed ─▶ layers ─▶ residual stream to the same shard of the next stage
    a stage       residual stream ─▶ layers ─▶ …             within a layer the shards' products are summed, twice
    last stage    residual stream ─▶ layers ─▶ its columns of the logits ─▶ rank 0

Rank 0 has the logits only when all ranks have filed their keys and values, so that what comes after a step may read the
blocks of every rank.

Every exchange has a deadline, and ends at once where the other side dies: a `RankError`, after which no rank can go on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]  # not in its stubs

from tie.bones.attention import Plan
from tie.bones.batch import Batch
from tie.bones.config import ModelConfig
from tie.bones.errors import InputError, RankError
from tie.bones.executor import Executor
from tie.bones.split import Split

LOOPBACK: Final = "127.0.0.1"
"""Where gloo listens: the ranks of one machine."""


class Links:
    """The connections of one rank. Not for several threads at once.

    Args:
        split: which rank.
        timeout: seconds for each exchange, the first included.
        address: of this rank, for the others; theirs alone.
    """

    def __init__(self, split: Split, *, timeout: float, address: str = LOOPBACK) -> None:
        self.split = split
        self._timeout = timedelta(seconds=timeout)
        self._address = address
        self._all: Any = None
        self._shards: Any = None

    def meet(self, meeting: Path) -> None:
        """Connects all ranks, each of which has to be ready for a step by then. Once.

        When it returns all are connected, and nobody needs the file any more.

        Args:
            meeting: a file that all ranks can write and nobody else can, in which they find each other; not there yet.

        Raises:
            RankError: the others did not come in time.
        """
        split = self.split
        with _translated():
            store = FileStore(str(meeting), split.world_size)
            store.set_timeout(self._timeout)
            self._all = self._group(store, "all", split.rank, split.world_size)
            # The shards of this stage. Where there is one stage they are all of the ranks.
            self._shards = self._all
            if split.pipeline > 1 and split.tensor > 1:
                self._shards = self._group(store, f"stage-{split.stage}", split.shard, split.tensor)
            # Who is through may be so before the others have read the file.
            self._all.allreduce(torch.zeros(1)).wait()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all shards' `x`, in float32 whatever `x` is."""
        total = x.float()
        with _translated():
            self._shards.allreduce(total).wait()
        return total

    def send(self, x: Tensor, rank: int) -> None:
        """Sends a tensor, which must be contiguous, to another rank."""
        with _translated():
            self._all.send([x], rank, 0).wait(self._timeout)

    def receive(self, x: Tensor, rank: int) -> Tensor:
        """Fills `x`, which must be contiguous, with what another rank sends."""
        with _translated():
            self._all.recv([x], rank, 0).wait(self._timeout)
        return x

    def _group(self, store: FileStore, name: str, rank: int, size: int) -> Any:
        # Made directly, with a device and a deadline of its own: `init_process_group` would have them of the process.
        # The names are PyTorch's own way to do it, underlined though they are.
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001
        options._devices = [gloo.create_device(hostname=self._address)]  # noqa: SLF001
        options._timeout = self._timeout  # noqa: SLF001
        return gloo(PrefixStore(name, store), rank, size, options)


class RankExecutor(Executor):
    """Executes one rank's part of every batch.

    Args:
        config: of the whole model.
        tensors: of the whole model; this rank's part of them is used where it lies.
        links: to the other ranks, which must have met before a batch is computed.
        announce: is told of each batch before it is computed, and tells the other ranks; None: this is not rank 0.
        options: as of `Executor`.

    Raises:
        ConfigError: the model cannot be split so. (And what `Executor` raises.)
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        links: Links,
        *,
        announce: Callable[[Batch], None] | None = None,
        **options: Any,
    ) -> None:
        split = links.split
        super().__init__(config, tensors, split=split, reduce=links.sum if split.tensor > 1 else None, **options)
        self._links = links
        self._split = split
        self._announce = announce

    def _begin(self, batch: Batch) -> None:
        if self._announce:
            self._announce(batch)

    def _run(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, plan: Plan, given: Sequence[tuple[int, Tensor]]
    ) -> Tensor:
        if given:  # of which the other ranks are not told
            raise InputError("a model on several ranks takes no vectors")
        split, links = self._split, self._links
        if split.stage:
            x = links.receive(torch.empty(len(tokens), self.config.hidden_size), split.rank - split.tensor)
        else:
            x = self._model.embed(tokens)
        x = self._model.layers(x, positions, plan)
        if not split.is_last:
            links.send(x, split.rank + split.tensor)
            part = None
        else:
            part = self._model.logits(x, wanted)
            if split.rank:
                # One row at least, for it also says that this rank is done.
                links.send(part if len(part) else part.new_zeros(1, part.shape[1]), 0)
        return self._collected(part, len(wanted)) if split.rank == 0 else x.new_empty(0, 0)

    def _collected(self, own: Tensor | None, count: int) -> Tensor:
        """All columns of the logits, `[count, vocab_size]`."""
        split, config = self._split, self.config
        logits = torch.empty(max(1, count), config.vocab_size)
        first = split.world_size - split.tensor
        for shard, rank in enumerate(range(first, split.world_size)):
            columns = split.columns(config, shard)
            if rank == 0 and own is not None:
                logits[:count, columns] = own
            else:
                logits[:, columns] = self._links.receive(logits[:, columns].contiguous(), rank)
        return logits[:count]


@contextmanager
def _translated() -> Iterator[None]:
    """PyTorch knows one error for a peer that died, one that is late and one that never came."""
    try:
        yield
    except RuntimeError:
        raise RankError("a rank is gone, or does not answer") from None
