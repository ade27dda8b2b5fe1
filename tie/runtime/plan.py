"""What one step is to do: the scheduler's answer, the engine's order."""

from dataclasses import dataclass

from tie.runtime.residency import Copy
from tie.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """A run of one sequence's tokens to compute.

    Attributes:
        start: tokens already computed.
        count: tokens to compute now, the draft included.
        logits: rows at the slice's end whose logits are wanted: 0 in the middle of a prefill, else 1, and one more for
            each token of the draft.
        draft: guessed tokens, after all known ones.
    """

    sequence: Sequence
    start: int
    count: int
    logits: int
    draft: tuple[int, ...] = ()

    @property
    def known(self) -> int:
        """Tokens to compute that are no guesses."""
        return self.count - len(self.draft)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: decodes first, then prompts. `copies` come before everything, one after the other."""

    slices: tuple[PlannedSlice, ...]
    preempted: tuple[Sequence, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(part.count for part in self.slices)

    @property
    def drafted(self) -> int:
        """Those of them that are guesses."""
        return sum(len(part.draft) for part in self.slices)
