"""One sequence: the tokens of a prompt and what has been generated for it, and how far its KV has been computed.

A request for n choices is n sequences, a family: the first computes their prompt, the others share its blocks. A
sequence holds what the scheduler needs and nothing of a model.
"""

import enum
from dataclasses import dataclass, field


class Phase(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # queued, or preempted and queued again
    RUNNING = "running"  # holds blocks
    FINISHED = "finished"


class Priority(enum.IntEnum):
    """Who goes first; the smaller number does."""

    CANARY = 0  # the health check: late tokens there would look like a broken node
    INTERACTIVE = 1
    BATCH = 2


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one sequence. Owned by the step thread.

    Attributes:
        prompt: token ids of the prompt, at least one.
        max_length: prompt and output together never grow beyond this.
        priority: its class.
        deadline: on the engine's monotonic clock, seconds; None for none.
        output: token ids generated so far.
        computed: how many of the leading tokens have keys and values in `blocks`.
        restored: how many of the leading tokens are being copied into its blocks, or will be once it has some: of its
            prefix, of a cached conversation, or of both; whole blocks, and never the whole prompt. What is copied
            counts as computed. 0 when that is done: should it lose its blocks then, it is computed like any other.
        prefix: nodes of the prefix trie that it begins with: their blocks are shared, and count as computed once they
            are loaded.
        blocks: the block table, in order.
        residence: names its hold on these blocks; no two admissions have the same. Given by the scheduler.
        order: position in the order of arrival; given by the scheduler.
        preemptions: how often its blocks were taken away.
        family: all sequences with this very prompt, itself included; empty where it is the only one.
        draft: guesses at the next tokens, to be verified in the next step; see `tie.runtime.speculation`.
        guest: a batch sequence that runs only because nobody else wanted its place; the scheduler's.
        overtaken: how many were admitted before it while it was first in its queue; the scheduler's.
        awaits_images: must not be admitted before images of its prompt have been looked at.
        served: the last step that computed some of it; the scheduler's.
    """

    prompt: tuple[int, ...]
    max_length: int
    priority: Priority = Priority.INTERACTIVE
    deadline: float | None = None
    output: list[int] = field(default_factory=list)
    computed: int = 0
    restored: int = 0
    prefix: tuple[int, ...] = ()
    blocks: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    residence: int = -1
    order: int = -1
    preemptions: int = 0
    family: "tuple[Sequence, ...]" = ()
    draft: tuple[int, ...] = ()
    guest: bool = False
    overtaken: int = 0
    served: int = 0
    awaits_images: bool = False

    @property
    def length(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Known tokens whose keys and values are not computed yet."""
        return self.length - self.computed

    @property
    def decoding(self) -> bool:
        """Whether an answer is being written: a token or, where a grammar forces some, a few are to be computed."""
        return self.remaining == 1 or (self.remaining > 0 and self.computed >= len(self.prompt))

    @property
    def shareable(self) -> int:
        """Leading tokens whose keys and values a sibling can give: the prompt's, but one token must be computed."""
        return min(len(self.prompt), self.length - 1) if self.family else 0

    @property
    def room(self) -> int:
        """Tokens that it may still grow by."""
        return self.max_length - self.length

    @property
    def full(self) -> bool:
        """Whether another token has no room."""
        return self.length >= self.max_length

    def tokens(self, start: int, count: int) -> list[int]:
        """Known tokens `start` … `start + count - 1`."""
        prompt, end = len(self.prompt), start + count
        return [*self.prompt[start:end], *self.output[max(0, start - prompt) : max(0, end - prompt)]]
