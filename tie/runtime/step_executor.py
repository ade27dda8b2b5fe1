"""What the engine needs of whatever executes the model: the seam at which another executor can stand."""

from typing import Any, Protocol

from tie.bones.batch import Batch


class StepExecutor(Protocol):
    """What the engine needs of an executor; `tie.bones.executor.Executor` is one."""

    def forward(self, batch: Batch) -> Any:
        """Float32 logits, an array or a CPU tensor, `[sum of the slices' logits, vocab]`, in the batch's order."""

    def block_view(self, block: int) -> memoryview:
        """The bytes of one block, in place and writable."""
