"""Decoding with fixed shapes: the same work on the same memory in every step, so that it can be captured and replayed.

One row a sequence launches some ten small kernels a layer, and a GPU is through with each before the host has sent the
next. A CUDA graph sends all of them at once. Its shapes cannot change, so there is one for each of a few numbers of
sequences, and a batch is padded up to the next (`numbers.padded`).
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tie.bones.batch import Rows
from tie.bones.cuda.attention import Kernel, Pass
from tie.bones.cuda.numbers import NOTHING, Upload, inputs, number, padded
from tie.bones.cuda.pool import DevicePool
from tie.bones.llama import Llama

_WARM_UPS = 2  # libraries choose and load their kernels, and take their memory, when they are first used


def decode_sizes(most: int) -> tuple[int, ...]:
    """The numbers of sequences that steps are made for: 1, 2, 4, 8, every 16, and `most` itself."""
    sizes = {size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most}
    return (*sorted(sizes), most)


class DecodeStep:
    """A forward pass over `size` decoding sequences, some of them padding.

    Args:
        model: whose pass it is.
        kernel: of its attention.
        pool: of its keys and values.
        size: sequences.
        most_pages: of each of them.
        device: where.
    """

    def __init__(
        self, model: Llama[Pass], kernel: Kernel, pool: DevicePool, *, size: int, most_pages: int, device: torch.device
    ) -> None:
        self.size = size
        self._model = model
        self._pool = pool
        self._upload = Upload(5 * size + size * most_pages, device)
        self._attend = kernel.decoder(size, most_pages)

    def fill(self, rows: Rows) -> None:
        """Takes up to `size` rows, each of its own sequence. The device must be through with those before."""
        numbers = number(padded(rows, self.size, self._pool.scratch), self._pool.block_tokens)
        sent = self._upload.send(numbers.packed)
        self._attend.update(numbers.table, sent[5 * self.size :])

    def run(self) -> Tensor:
        """Computes what was filled in. Logits, `[size, vocab_size]`: first those that are wanted, in batch order."""
        told = inputs(self._upload.target, self.size, self.size)
        return self._model.forward(told.tokens, told.positions, told.wanted, Pass(told, self._attend))


def captured(steps: Iterable[DecodeStep]) -> dict[int, Callable[[], Tensor]]:
    """CUDA graphs of the steps' `run`, by size. What one returns holds until any of them is called again.

    They share the memory of what lies between: the largest is captured first, and the others fit into it.
    """
    memory = torch.cuda.graph_pool_handle()
    replays = {}
    for step in sorted(steps, key=lambda step: -step.size):
        step.fill(NOTHING)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                step.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            logits = step.run()
        replays[step.size] = _replay(graph, logits)
    return replays


def _replay(graph: torch.cuda.CUDAGraph, logits: Tensor) -> Callable[[], Tensor]:
    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay
