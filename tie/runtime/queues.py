"""Who waits, and who is next in each class. Pure; the rules are the scheduler's 4 and 5."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tie.runtime.sequence import Priority, Sequence

OVERTAKES = 8


@dataclass(frozen=True, slots=True)
class Fit:
    """What may be admitted now.

    Attributes:
        blocked: it could share a sibling's blocks in a moment, or belongs to the long prompts and enough of these are
            being computed: those behind it go first, at no cost to it.
        fits: there are blocks for it.
        short: its tokens to compute fit one step.
    """

    blocked: Callable[[Sequence], bool]
    fits: Callable[[Sequence], bool]
    short: Callable[[Sequence], bool]


class Queues:
    """The waiting sequences: per class, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[Priority, deque[Sequence]] = {priority: deque() for priority in Priority}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._waiting.values():
            yield from queue

    def count(self, priority: Priority) -> int:
        """How many of a class wait."""
        return len(self._waiting[priority])

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, at the place that its arrival gives it."""
        queue = self._waiting[sequence.priority]
        if not queue or queue[-1].order < sequence.order:
            queue.append(sequence)
        else:
            queue.insert(sum(entry.order < sequence.order for entry in queue), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out."""
        self._waiting[sequence.priority].remove(sequence)

    def first(self, priority: Priority, fit: Fit) -> Sequence | None:
        """The first of a class that is not blocked, whether it fits or not."""
        return next((entry for entry in self._waiting[priority] if not fit.blocked(entry)), None)

    def overtaker(self, first: Sequence, fit: Fit) -> Sequence | None:
        """A short one that fits where the `first` of its class does not; not more often than `OVERTAKES` times."""
        if first.overtaken >= OVERTAKES:
            return None
        for entry in self._waiting[first.priority]:
            if entry.order > first.order and fit.short(entry) and not fit.blocked(entry) and fit.fits(entry):
                first.overtaken += 1
                return entry
        return None
