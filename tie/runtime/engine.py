"""The engine: one thread that turns requests into tokens, step by step.

    draft → plan → forward → choose (grammar, sample) → text, stops → events

Everybody else talks to it through thread-safe calls (`submit`, `cancel`, `drain`, `status`), which leave a note in its
inbox; it reads the inbox between two steps, so each is honoured within one. A request that misbehaves fails alone. If
the executor itself fails, all are told so, the engine is FAILED for good, and `on_failure` ends the process.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from tie.assets.tokenizer import Tokenizer
from tie.bones.batch import Batch, SequenceSlice
from tie.daemon import log
from tie.proto import engine_pb2, runtime_pb2
from tie.runtime.blocks import BlockPool
from tie.runtime.chooser import Chooser
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.images.request_images import RequestImages
from tie.runtime.jobs import Job, Jobs, Sink
from tie.runtime.keeping import Keep
from tie.runtime.kv_blocks import Restored
from tie.runtime.metrics import EngineMetrics
from tie.runtime.pace import Pace
from tie.runtime.plan import Plan, PlannedSlice
from tie.runtime.prefix_cache import PrefixCache
from tie.runtime.request import Bounds, Request
from tie.runtime.scheduler import Limits, Scheduler
from tie.runtime.sequence import Sequence
from tie.runtime.speculation import Speculation
from tie.runtime.step_executor import Executor

_POLL_S = 0.02  # how often deadlines are looked at while there is nothing to compute but somebody waits
_IDLE_S = 1.0
# How long answers that stream are held up in one step by copying the blocks of a registered prompt or of somebody's
# cached conversation.
_RESTORE_S = 0.004


@dataclass(frozen=True, slots=True)
class Status:
    """What the engine says of itself; see engine.proto."""

    state: "engine_pb2.State.ValueType"
    running: int
    waiting: int
    steps: int
    max_batch_seen: int
    last_step_age_s: float


class Engine:
    """Runs requests on an executor.

    Args:
        executor: computes a batch.
        pool: the KV blocks, in the executor's numbering.
        limits: the scheduler's bounds.
        bounds: vocabulary and longest sequence.
        tokenizer: the bundle's.
        end_ids: the bundle's end-of-turn tokens.
        grammars: compiles grammars.
        prefix: blocks of registered system prompts.
        speculation: whether drafts are made where they pay.
        clock: seconds, by which the cost of steps is measured.
        on_failure: called once, on the step thread, when the executor has failed.
    """

    def __init__(
        self,
        executor: Executor,
        pool: BlockPool,
        limits: Limits,
        bounds: Bounds,
        *,
        tokenizer: Tokenizer,
        end_ids: frozenset[int],
        grammars: GrammarCompiler,
        on_failure: Callable[[], None],
        prefix: PrefixCache | None = None,
        speculation: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.bounds = bounds
        self.metrics = EngineMetrics()
        self._executor = executor
        self._pool = pool
        self._grammars = grammars
        self._on_failure = on_failure
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        # Shared between threads, guarded by _wake:
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._unfinished = 0  # choices of requests that have not had their last event
        self._state: engine_pb2.State.ValueType = engine_pb2.STATE_INITIALIZING
        # The step thread's own:
        self._prefix = prefix or PrefixCache(pool)
        self._scheduler = Scheduler(limits, pool, self._prefix)
        self._jobs = Jobs(
            self._scheduler,
            self._prefix,
            bounds=bounds,
            tokenizer=tokenizer,
            end_ids=end_ids,
            metrics=self.metrics,
            on_end=self._ended,
            later=self._tell,
        )
        self._pace = Pace(limits.step_tokens)
        self._speculates = speculation
        self._speculation = Speculation(self._pace.decode_cost)
        self._chooser = Chooser(self._jobs, self._speculation)
        self._drain_deadline: float | None = None
        self._stopping = False
        self._steps = 0
        self._max_batch = 0
        self._last_step = time.monotonic()

    # --- for any thread ---

    def start(self) -> None:
        """Starts the step thread."""
        self._state = engine_pb2.STATE_READY
        self._thread.start()

    def submit(
        self,
        request: Request,
        sink: Sink,
        *,
        restoring: "Future[Restored | None] | None" = None,
        images: RequestImages | None = None,
        keep: Keep | None = None,
    ) -> Job:
        """Takes a request; everything that becomes of it, refusal included, goes to `sink`.

        Args:
            request: what is asked.
            sink: gets its events.
            restoring: the first blocks of its prompt; it waits for them, and does without where there are none.
            images: its images; it waits for that, and fails where one is refused.
            keep: takes the first choice's blocks when that is complete.
        """
        job = Job(request, sink, arrived=time.monotonic(), restoring=restoring, images=images, keep=keep)
        with self._wake:
            self._unfinished += len(request.params)
        if request.grammar is not None:
            job.compiling = self._grammars.compile(request.grammar)
        self._tell(lambda: self._jobs.admit(job, draining=self._state != engine_pb2.STATE_READY))
        for awaited in (job.compiling, restoring):
            if awaited:
                awaited.add_done_callback(lambda _: self._tell(lambda: self._jobs.prepared(job)))
        return job

    def cancel(self, job: Job) -> None:
        """Ends a request within one step. One that has ended already is left alone."""
        self._tell(lambda: self._jobs.cancel(job))

    def drain(self, deadline_s: float) -> None:
        """Refuses new requests from now on; cuts off those that still run after `deadline_s` seconds."""
        deadline = time.monotonic() + deadline_s
        with self._wake:
            if self._state == engine_pb2.STATE_READY:
                self._state = engine_pb2.STATE_DRAINING

        def note() -> None:
            self._drain_deadline = deadline

        self._tell(note)

    def stop(self, timeout: float) -> bool:
        """Ends the step thread after the current step; true when it has ended within `timeout` seconds."""

        def note() -> None:
            self._stopping = True

        self._tell(note)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def status(self) -> Status:
        """The engine's state now. `running + waiting` is 0 only when every request has had its last event."""
        with self._wake:
            unfinished = self._unfinished
        running = min(self._scheduler.running, unfinished)
        return Status(
            state=self._state,
            running=running,
            waiting=unfinished - running,
            steps=self._steps,
            max_batch_seen=self._max_batch,
            last_step_age_s=time.monotonic() - self._last_step,
        )

    @property
    def pool(self) -> BlockPool:
        """The KV blocks. Their ledger is exact when the step thread has ended."""
        return self._pool

    def _tell(self, note: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(note)
            self._wake.notify()

    # --- the step thread ---

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._read_inbox()
                self._enforce_deadlines(time.monotonic())
                if self._speculates:
                    self._speculation.draft(self._scheduler.decoding())
                plan = self._scheduler.plan(self._pace.tokens, self._restore)
                self._jobs.lost(plan.preempted)
                if plan.slices:
                    self._step(plan)
                elif self._chooser:
                    self._chooser.choose(_POLL_S)
        except BaseException as error:  # noqa: BLE001 (whatever it is, no later step can be trusted)
            log.failure("engine.failed", error, steps=self._steps)
            with self._wake:
                self._state = engine_pb2.STATE_FAILED
            self._jobs.fail_all(runtime_pb2.CODE_INTERNAL, "the engine failed")
            self._on_failure()

    def _step(self, plan: Plan) -> None:
        began = self._clock()
        copies = tuple((copy.source, copy.target) for copy in plan.copies)
        logits = np.asarray(self._executor.forward(Batch(tuple(map(self._slice, plan.slices)), copies)))
        self._scheduler.computed(plan)
        self._chooser.add(plan, logits)
        self._chooser.choose()
        self._record(plan, self._clock() - began)

    def _restore(self, waiting: list[Sequence]) -> None:
        """Copies what sequences begin with into their blocks; beside answers that stream, for a moment a step."""
        until = self._clock() + _RESTORE_S if self._scheduler.decoding() else math.inf

        def may_go_on() -> bool:
            return self._clock() < until

        for sequence in waiting:
            there = self._prefix.load(sequence.prefix, may_go_on)
            sequence.computed = max(sequence.computed, there * self._pool.block_tokens)
            job, _ = self._jobs.owner(sequence)
            if there < len(sequence.prefix):
                return
            if job.restored and not job.restored.copy_into(self._executor, sequence, may_go_on):
                return
            sequence.restored = 0
            if job.restored:
                job.restored.close()
                job.restored = None
            if not may_go_on():
                return

    def _read_inbox(self) -> None:
        with self._wake:
            if not self._inbox and not self._scheduler.running:
                self._wake.wait(_POLL_S if self._jobs or self._drain_deadline is not None else _IDLE_S)
            notes, self._inbox = self._inbox, deque()
        for note in notes:
            note()

    def _enforce_deadlines(self, now: float) -> None:
        self._jobs.enforce_deadlines(now)
        if self._drain_deadline is not None and now >= self._drain_deadline:
            self._drain_deadline = None
            self._jobs.fail_all(runtime_pb2.CODE_REPLACED, "the node had to restart: send it again")

    def _ended(self, job: Job) -> None:
        with self._wake:
            self._unfinished -= len(job.request.params)

    def _record(self, plan: Plan, seconds: float) -> None:
        self._pace.record(plan, seconds)
        self._steps += 1
        self._last_step = time.monotonic()
        self._max_batch = max(self._max_batch, len(plan.slices))
        self.metrics.record_step(plan, seconds, running=self._scheduler.running, waiting=self._scheduler.waiting)
        self.metrics.record_drafts(self._speculation.drafted, self._speculation.accepted)
        self.metrics.record_pool(self._pool.statistics())
        self.metrics.record_prefix(self._prefix.statistics, self._prefix.hot)

    def _slice(self, part: PlannedSlice) -> SequenceSlice:
        sequence = part.sequence
        tokens = [*sequence.tokens(part.start, part.known), *part.draft]
        images = self._jobs.owner(sequence)[0].images
        given = images.embeddings.within(part.start, part.known) if images and images.embeddings else ()
        return SequenceSlice(tokens, part.start, sequence.blocks, part.logits, sequence.residence, given)
