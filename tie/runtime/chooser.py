"""From logits to tokens: samples the rows of a step, each as soon as its grammar has said what it allows.

A grammar works on that while the forward pass runs, and is nearly always done first. One that is not keeps its row and
misses a step or more; nobody waits for it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tie.bones.errors import SamplingError
from tie.bones.sampler import Sampled, SampleRow, sample
from tie.proto import runtime_pb2
from tie.runtime.choice import Choice
from tie.runtime.jobs import Job, Jobs
from tie.runtime.scheduler import Plan
from tie.runtime.sequence import Phase

GRACE_S: Final = 0.002  # less than a step by far, and enough for the few microseconds of a usual mask


@dataclass(eq=False, slots=True)
class Row:
    """One row of logits that waits for its token; `source[index]` is `[vocab]`."""

    job: Job
    choice: Choice
    source: torch.Tensor
    index: int

    @property
    def wanted(self) -> bool:
        """Whether the token still is. A preempted sequence computes its logits anew."""
        sequence = self.choice.sequence
        return not self.job.done and sequence.phase is Phase.RUNNING and sequence.remaining == 0

    def keep(self) -> None:
        """Makes the logits its own: the next step may overwrite the batch's."""
        self.source, self.index = self.source[self.index].clone().unsqueeze(0), 0


class Chooser:
    """The rows whose tokens are not chosen yet. The step thread's own.

    Args:
        jobs: whose they are; gets the tokens.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, plan: Plan, logits: torch.Tensor) -> None:
        """Takes a step's logits, `[slices that have logits, vocab]`, in the plan's order."""
        for index, part in enumerate(part for part in plan.slices if part.logits):
            job, choice = self._jobs.owner(part.sequence)
            self._rows.append(Row(job, choice, logits, index))

    def choose(self, patience: float = GRACE_S) -> None:
        """One token, or the several that a grammar forces, for each row that is ready within `patience` seconds."""
        chosen = self._sample(self._ready(time.monotonic() + patience))
        for row, token in chosen:
            with self._jobs.alone(row.job):
                self._jobs.deliver(row.job, row.choice, row.choice.accept(token))
        # By now most grammars know what is next: where that is forced, it joins the next step.
        for row, _ in chosen:
            if not row.job.done and row.choice.sequence.phase is Phase.RUNNING:
                with self._jobs.alone(row.job):
                    if row.choice.ready(0):
                        self._force(row)

    def _ready(self, deadline: float) -> list[tuple[Row, SampleRow]]:
        ready: list[tuple[Row, SampleRow]] = []
        rows, self._rows = self._rows, []
        for row in rows:
            if not row.wanted:
                continue
            with self._jobs.alone(row.job):
                if not row.choice.ready(max(0.0, deadline - time.monotonic())):
                    row.keep()
                    self._rows.append(row)
                elif not self._force(row):
                    ready.append((row, row.choice.row()))
        return ready

    def _force(self, row: Row) -> bool:
        outcome = row.choice.forced()
        if outcome:
            self._jobs.deliver(row.job, row.choice, outcome)
        return outcome is not None

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


def _stacked(rows: Sequence[Row]) -> torch.Tensor:
    """The rows' logits as one tensor; without a copy where they are all of a batch."""
    source = rows[0].source
    if all(row.source is source for row in rows):
        return source if len(rows) == len(source) else source[[row.index for row in rows]]
    return torch.stack([row.source[row.index] for row in rows])
