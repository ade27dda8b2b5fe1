"""From logits to tokens: samples the rows of a step, each as soon as its grammar has said what it allows.

A draft brings several rows of one sequence: the first is sampled as ever, and while the token is the one that was
guessed, the next row's logits are those that would have come in the next step.

A grammar works on that while the forward pass runs, and is nearly always done first. One that is not keeps its row and
misses a step or more; nobody waits for it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tie.bones.errors import SamplingError
from tie.bones.sampler import Floats, Sampled, SampleRow, sample
from tie.proto import runtime_pb2
from tie.runtime.choice import Choice
from tie.runtime.jobs import Job, Jobs
from tie.runtime.plan import Plan
from tie.runtime.sequence import Phase
from tie.runtime.speculation import Speculation

GRACE_S: Final = 0.002  # less than a step by far, and enough for the few microseconds of a usual mask


@dataclass(eq=False, slots=True)
class Row:
    """One row of logits that waits for its token; `source[index]` is `[vocab]`.

    Attributes:
        draft: guesses at this token and those after it; the rows that follow this one are theirs.
        accepted: guesses that came true already.
    """

    job: Job
    choice: Choice
    source: Floats
    index: int
    draft: tuple[int, ...] = ()
    accepted: int = 0

    @property
    def wanted(self) -> bool:
        """Whether the token still is. A preempted sequence computes its logits anew."""
        sequence = self.choice.sequence
        return not self.job.done and sequence.phase is Phase.RUNNING and sequence.remaining == 0

    def keep(self) -> None:
        """Makes the logits its own: the next step may overwrite the batch's."""
        self.source, self.index = self.source[self.index : self.index + 1 + len(self.draft)].copy(), 0

    def follow(self, tokens: Sequence[int]) -> bool:
        """Moves on over tokens that were just appended; false when the draft is at its end, or guessed otherwise."""
        for token in tokens:
            if self.draft[:1] != (token,):
                return False
            self.draft, self.index, self.accepted = self.draft[1:], self.index + 1, self.accepted + 1
            self.choice.sequence.computed += 1  # this guess's keys and values are the token's
        return True


class Chooser:
    """The rows whose tokens are not chosen yet. The step thread's own.

    Args:
        jobs: whose they are; gets the tokens.
        speculation: learns which guesses came true.
    """

    def __init__(self, jobs: Jobs, speculation: Speculation) -> None:
        self._jobs = jobs
        self._speculation = speculation
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, plan: Plan, logits: Floats) -> None:
        """Takes a step's logits, `[sum of the slices' logits, vocab]`, in the plan's order."""
        index = 0
        for part in plan.slices:
            if part.logits:
                job, choice = self._jobs.owner(part.sequence)
                self._rows.append(Row(job, choice, logits, index, part.draft))
                index += part.logits

    def choose(self, patience: float = GRACE_S) -> None:
        """For each row that is ready within `patience` seconds a token; more where guesses or a grammar give them."""
        deadline = time.monotonic() + patience
        rows, self._rows = self._rows, []
        ended: list[Row] = []
        while rows:
            chosen = self._sample(self._ready(rows, deadline))
            rows = []
            for row, token in chosen:
                with self._jobs.alone(row.job):
                    self._jobs.deliver(row.job, row.choice, row.choice.accept(token))
                    (rows if self._follow(row, (token.token_id,)) else ended).append(row)
        # By now most grammars know what is next: where that is forced, it joins the next step.
        for row in ended:
            if not row.job.done and row.choice.sequence.phase is Phase.RUNNING:
                with self._jobs.alone(row.job):
                    if row.choice.ready(0):
                        self._force(row)

    def _ready(self, rows: Sequence[Row], deadline: float) -> list[tuple[Row, SampleRow]]:
        """The rows to sample now. Others are kept for a later step, or got tokens from their grammar."""
        ready: list[tuple[Row, SampleRow]] = []
        for row in rows:
            with self._jobs.alone(row.job):
                while row.wanted:
                    if not row.choice.ready(max(0.0, deadline - time.monotonic())):
                        row.keep()
                        self._rows.append(row)
                        break
                    forced = self._force(row)
                    if not forced:
                        ready.append((row, row.choice.row()))
                        break
                    if not self._follow(row, forced):
                        break
        return ready

    def _force(self, row: Row) -> Sequence[int]:
        output = row.choice.sequence.output
        before = len(output)
        outcome = row.choice.forced()
        if outcome:
            self._jobs.deliver(row.job, row.choice, outcome)
        return output[before:]

    def _follow(self, row: Row, tokens: Sequence[int]) -> bool:
        """Moves a row on over new tokens; whether it has logits for what comes after them."""
        drafted = row.accepted + len(row.draft)
        if row.follow(tokens) and row.wanted:
            return True
        if drafted:
            self._speculation.learn(row.choice.sequence, row.accepted, drafted)
        return False

    def _sample(self, ready: list[tuple[Row, SampleRow]]) -> list[tuple[Row, Sampled]]:
        """A token for each; a row that allows none fails its request."""
        tokens: list[Sampled] = []
        while ready and not tokens:
            try:
                tokens = sample(_stacked([row for row, _ in ready]), [how for _, how in ready])
            except SamplingError as error:
                for index in error.rows:
                    job = ready[index][0].job
                    self._jobs.fail(job, runtime_pb2.CODE_INVALID, "sampling: no token is left to choose")
                ready = [(row, how) for row, how in ready if not row.job.done]
        return [(row, token) for (row, _), token in zip(ready, tokens, strict=True)]


def _stacked(rows: Sequence[Row]) -> Floats:
    """The rows' logits as one array; without a copy where they are all of a batch."""
    source = rows[0].source
    if all(row.source is source for row in rows):
        return source if len(rows) == len(source) else source[[row.index for row in rows]]
    return np.stack([row.source[row.index] for row in rows])
