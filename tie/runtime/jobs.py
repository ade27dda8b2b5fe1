"""The life of a request inside the engine, from its arrival to its last event. Owned by the step thread."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tie.assets.tokenizer import Tokenizer
from tie.daemon import log
from tie.proto import runtime_pb2
from tie.runtime.choice import Choice, Outcome
from tie.runtime.closing import Closing
from tie.runtime.grammar import Grammar, GrammarError
from tie.runtime.grammar_compiler import COMPILE_DEADLINE_S, CompilerBusyError
from tie.runtime.images.image_scheduling import ImageScheduling
from tie.runtime.images.request_images import RequestImages
from tie.runtime.keeping import Keep, Keeping, Later
from tie.runtime.kv_blocks import Restored
from tie.runtime.metrics import EngineMetrics
from tie.runtime.prefix_cache import PrefixCache
from tie.runtime.request import Bounds, Request, RequestRefusedError
from tie.runtime.scheduler import Scheduler
from tie.runtime.sequence import Phase, Priority, Sequence


class Sink(Protocol):
    """Where a request's events go. Called by the step thread: it must not block."""

    def emit(self, event: runtime_pb2.GenerateEvent, *, last: bool) -> None:
        """Takes one event; `last` is true exactly once, for the last."""


@dataclass(eq=False, slots=True)
class Job:
    """One request inside the engine.

    Attributes:
        arrived: on the monotonic clock, seconds.
        choices: empty until its sequences are queued.
        compiling: its grammar, while that is being compiled.
        restoring: the first blocks of its prompt, while they are being received.
        restored: those blocks, until they have been copied.
        images: its images, where it has some.
        keep: takes the first choice's blocks at its end.
        spoke: whether a token has been generated.
        done: whether its last event has been sent.
    """

    request: Request
    sink: Sink
    arrived: float
    choices: list[Choice] = field(default_factory=list)
    compiling: "Future[Grammar] | None" = None
    restoring: "Future[Restored | None] | None" = None
    restored: Restored | None = None
    images: RequestImages | None = None
    keep: Keep | None = None
    spoke: bool = False
    done: bool = False

    @property
    def canary(self) -> bool:
        """Whether this is a health check."""
        return self.request.priority is Priority.CANARY

    def overdue(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.request.deadline_s is not None and now - self.arrived > self.request.deadline_s


class Jobs:
    """All unfinished requests.

    Args:
        scheduler: gets their sequences.
        prefix: blocks of registered system prompts.
        bounds: vocabulary and longest sequence.
        tokenizer: the bundle's.
        end_ids: the bundle's end-of-turn tokens.
        metrics: counts outcomes.
        on_end: called with each job after its last event.
        later: has something done on the step thread, between two steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        prefix: PrefixCache,
        *,
        bounds: Bounds,
        tokenizer: Tokenizer,
        end_ids: frozenset[int],
        metrics: EngineMetrics,
        on_end: Callable[[Job], None],
        later: Later,
    ) -> None:
        self._scheduler = scheduler
        self._prefix = prefix
        self._bounds = bounds
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._closing = Closing(tokenizer, end_ids, bounds.vocab_size)
        self._metrics = metrics
        self._on_end = on_end
        self._image_scheduling = ImageScheduling(prefix, scheduler.pool.block_tokens, later)
        self._keeping = Keeping(scheduler.pool, later)
        self._jobs: list[Job] = []
        self._owners: dict[Sequence, tuple[Job, Choice]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def owner(self, sequence: Sequence) -> tuple[Job, Choice]:
        """Whose sequence it is."""
        return self._owners[sequence]

    @contextmanager
    def alone(self, job: Job) -> Iterator[None]:
        """What goes wrong inside the block fails this request only."""
        try:
            yield
        except CompilerBusyError as error:
            self.fail(job, runtime_pb2.CODE_BUSY, str(error))
        except RequestRefusedError as error:
            self.fail(job, error.code, error.detail)
        except GrammarError as error:
            self.fail(job, runtime_pb2.CODE_GRAMMAR, f"grammar: {error}")
        except Exception as error:  # noqa: BLE001 (one bad request never ends the loop)
            log.failure("engine.request-failed", error)
            self.fail(job, runtime_pb2.CODE_INTERNAL, "the request failed inside the engine")

    def admit(self, job: Job, *, draining: bool) -> None:
        """Takes a new request, or refuses it."""
        self._jobs.append(job)
        if draining:
            self.fail(job, runtime_pb2.CODE_DRAINING, "the runtime is about to be replaced")
        elif not self._has_room(job):
            self.fail(job, runtime_pb2.CODE_BUSY, "the queue is full")
        else:
            self.prepared(job)

    def prepared(self, job: Job) -> None:
        """Goes on with a request when all that it waited for is there: its grammar, blocks to restore, its images."""
        if job.restoring and job.restoring.done():
            job.restored, job.restoring = job.restoring.result(timeout=0), None
            if job.done and job.restored:
                job.restored.close()
        if job.images and not job.images.begun and not job.restoring and not job.done:
            self._image_scheduling.begin(job.images, job.request, job.restored, partial(self.prepared, job))
        waits = job.restoring or (job.compiling and not job.compiling.done()) or (job.images and job.images.pending)
        if job.done or job.choices or waits:
            return
        with self.alone(job):
            grammar = job.compiling.result(timeout=0) if job.compiling else None
            job.compiling = None
            if job.images:
                job.images.take()
                job.request = job.images.place(job.request, self._bounds)
                job.sink.emit(runtime_pb2.GenerateEvent(looked=job.images.looked()), last=False)
            if self._has_room(job):
                self.enqueue(job, grammar)
            else:
                self.fail(job, runtime_pb2.CODE_BUSY, "the queue is full")

    def lost(self, sequences: Iterable[Sequence]) -> None:
        """Sequences have lost their blocks, or have none: what is missing of their images must be looked at."""
        for sequence in sequences:
            job, _ = self._owners[sequence]
            if job.images:
                self._image_scheduling.again(job.images, sequence, partial(self._regained, job, sequence))

    def _regained(self, job: Job, sequence: Sequence) -> None:
        if job.images and not job.done:
            with self.alone(job):
                job.images.take()
                sequence.awaits_images = False

    def enqueue(self, job: Job, grammar: Grammar | None) -> None:
        """Queues the request's sequences."""
        request = job.request
        job.choices = [
            Choice(
                request,
                index,
                max_length=self._bounds.max_length,
                end_ids=self._end_ids,
                tokenizer=self._tokenizer,
                grammar=grammar.fork() if grammar else None,
                closing=self._closing,
                deadline=None if request.deadline_s is None else job.arrived + request.deadline_s,
            )
            for index in range(len(request.params))
        ]
        prefix = self._prefix.match(request.prompt)
        for choice in job.choices:
            choice.share(prefix, len(prefix) * self._scheduler.pool.block_tokens)
        if job.restored and job.restored.first_block > len(prefix):
            job.restored.close()  # they follow a prefix that is not there: the prompt is computed in full
            job.restored = None
        if job.restored:
            last = job.restored.first_block + job.restored.block_count
            job.choices[0].restore(last * self._scheduler.pool.block_tokens)
        family = tuple(choice.sequence for choice in job.choices)
        for choice in job.choices:
            choice.sequence.family = family if len(family) > 1 else ()
            self._scheduler.submit(choice.sequence)
            self._owners[choice.sequence] = (job, choice)
            if not job.restored:
                self.lost([choice.sequence])
        self._metrics.prompt_tokens.inc(len(request.prompt))

    def deliver(self, job: Job, choice: Choice, outcome: Outcome) -> None:
        """Sends what became of new tokens."""
        if job.done:
            return  # another of its choices failed in this very step
        self._metrics.output_tokens.inc(len(outcome.tokens.token_ids) if outcome.tokens else 1)
        if not job.spoke:
            job.spoke = True
            if not job.canary:
                self._metrics.first_token_seconds.observe(time.monotonic() - job.arrived)
        if outcome.tokens:
            job.sink.emit(runtime_pb2.GenerateEvent(tokens=outcome.tokens), last=False)
        if outcome.finished:
            self._finish(job, choice, outcome.finished)

    def cancel(self, job: Job) -> None:
        """Ends a request at its client's wish."""
        if job.choices:
            for choice in job.choices:
                if choice.sequence.phase is not Phase.FINISHED:
                    self._finish(job, choice, choice.finished(runtime_pb2.REASON_CANCELLED))
        elif not job.done:
            finished = runtime_pb2.Finished(reason=runtime_pb2.REASON_CANCELLED)
            self._end(job, runtime_pb2.GenerateEvent(finished=finished), "cancelled")

    def fail(self, job: Job, code: "runtime_pb2.Code.ValueType", detail: str) -> None:
        """Ends a request with an error."""
        if not job.done:
            failed = runtime_pb2.Failed(code=code, detail=detail)
            outcome = runtime_pb2.Code.Name(code).removeprefix("CODE_").lower()
            self._end(job, runtime_pb2.GenerateEvent(failed=failed), outcome)

    def fail_all(self, code: "runtime_pb2.Code.ValueType", detail: str) -> None:
        """Ends every request with an error."""
        for job in list(self._jobs):
            self.fail(job, code, detail)

    def enforce_deadlines(self, now: float) -> None:
        """Ends what has run, waited or compiled for too long."""
        for sequence in self._scheduler.expired(now):
            if sequence in self._owners:  # not ended by a sibling a moment ago
                self.fail(self._owners[sequence][0], runtime_pb2.CODE_DEADLINE, "deadline_ms: exceeded")
        for job in [job for job in self._jobs if job.compiling and now - job.arrived > COMPILE_DEADLINE_S]:
            self.fail(job, runtime_pb2.CODE_GRAMMAR, "grammar: took too long to compile")
        for job in [job for job in self._jobs if job.images and job.images.pending and job.overdue(now)]:
            self.fail(job, runtime_pb2.CODE_DEADLINE, "deadline_ms: exceeded")

    def _has_room(self, job: Job) -> bool:
        return job.canary or self._scheduler.room >= len(job.request.params)

    def _finish(self, job: Job, choice: Choice, finished: runtime_pb2.Finished) -> None:
        if job.keep and choice.index == 0:
            keep, job.keep = job.keep, None
            complete = finished.reason != runtime_pb2.REASON_CANCELLED
            keep(self._keeping.hold(choice.sequence) if complete else None)
        self._release(choice)
        event = runtime_pb2.GenerateEvent(finished=finished)
        if any(other.sequence.phase is not Phase.FINISHED for other in job.choices):
            job.sink.emit(event, last=False)
        else:
            self._end(job, event, runtime_pb2.Reason.Name(finished.reason).removeprefix("REASON_").lower())

    def _end(self, job: Job, event: runtime_pb2.GenerateEvent, outcome: str) -> None:
        # Every request ends here, once.
        for choice in job.choices:
            self._release(choice)
        job.done = True
        if job.restored:
            job.restored.close()
        if job.keep:
            job.keep(None)
        if job.compiling:
            job.compiling.cancel()  # so that nobody waits behind a grammar that nobody waits for
        if job.images:
            job.images.cancel()
        self._jobs.remove(job)
        self._metrics.requests.labels(kind="canary" if job.canary else "request", outcome=outcome).inc()
        job.sink.emit(event, last=True)
        self._on_end(job)

    def _release(self, choice: Choice) -> None:
        if self._owners.pop(choice.sequence, None):
            self._scheduler.finish(choice.sequence)
