"""Watches the engine: its death notice, its status, its canary; warms it; recycles it."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from status_probe.canary import TIMEOUT, CanaryResult, fly
from status_probe.engine_client import DeathNotice, ask
from status_probe.state import Facts, judge
from tie.assets.bundle import Bundle
from tie.daemon import log
from tie.daemon.config import NodeConfig
from tie.daemon.errors import PeerDiedError, PeerError
from tie.daemon.triton import TritonClient
from tie.proto import engine_pb2, probe_pb2

_RETRY_S: Final = 0.1  # between two looks for an engine that starts
_CANARY_RETRY_S: Final = 1.0  # after a failed canary
_STATUS_S: Final = 1.0  # between two status questions
_ANSWER_S: Final = 5.0
_WARM_ONE_S: Final = 130.0  # one system prompt; longer than the engine's own limit
_DRAIN_POLL_S: Final = 0.05
_DRAIN_GRACE_S: Final = 2.0  # after the drain deadline, for those that fail by it to end


class Probe:
    """The runtime's health, kept up to date by `run`.

    Args:
        config: the node's.
        bundle: the node's; its manifest says which prompts are registered.
        instance_id: which runtime this probe belongs to.
        exit_now: asks the process to end, which ends the container.
    """

    def __init__(self, config: NodeConfig, bundle: Bundle, instance_id: str, exit_now: Callable[[], None]) -> None:
        self._config = config
        self._bundle = bundle
        self._instance_id = instance_id
        self._exit_now = exit_now
        self._facts = Facts()
        self._engine = engine_pb2.EngineStatus()
        self._began = time.monotonic()
        self._said: tuple[probe_pb2.State.ValueType, str] = judge(self._facts)
        self._changed = asyncio.Event()
        self._recycle: asyncio.Task[None] | None = None
        self._warm_turn = asyncio.Lock()

    async def run(self) -> None:
        """Watches for ever; cancel to end."""
        async with asyncio.TaskGroup() as tasks:
            late = tasks.create_task(self._start_deadline())
            notice = await self._wait_for_engine()
            late.cancel()
            try:
                tasks.create_task(self._ask_status())
                await self._fly_canaries()
            finally:
                notice.close()

    def status(self) -> probe_pb2.RuntimeStatus:
        """What the probe knows now."""
        state, reason = judge(self._facts)
        now = time.monotonic()
        canary = self._facts.canary
        return probe_pb2.RuntimeStatus(
            state=state,
            instance_id=self._instance_id,
            reasons=[reason] if reason else [],
            last_canary=None if canary is None else _told(canary, now),
            model=self._bundle.manifest.model,
            release=self._bundle.manifest.release,
            executor=self._engine.executor,
            running=self._engine.running,
            waiting=self._engine.waiting,
            max_batch_seen=self._engine.max_batch_seen,
            uptime_s=now - self._began,
            warmed=self._facts.warmed,
            owner_generation=self._engine.owner_generation,
            prefix=self._engine.prefix if self._engine.HasField("prefix") else None,
        )

    async def changes(self, heartbeat_s: float) -> AsyncGenerator[probe_pb2.RuntimeStatus, None]:
        """The status now, at every change of state, and at least every `heartbeat_s` seconds."""
        while True:
            changed = self._changed
            yield self.status()
            with suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):
                    await changed.wait()

    async def metrics(self) -> str:
        """The engine's metrics as Prometheus text; nothing while there is no engine."""
        with suppress(PeerError):
            self._engine = (await self._ask(status=engine_pb2.StatusRequest())).status
            return self._engine.metrics
        return ""

    async def warm(self) -> AsyncGenerator[probe_pb2.WarmProgress, None]:
        """Has every registered system prompt in the prefix pool, one after another; computes what is not there yet.

        Raises:
            PeerError: the engine went away, or one could not be computed or kept.
        """
        total = len(self._bundle.manifest.system_prompts)
        async with self._warm_turn:
            self._facts.warming = True
            self._update()
            try:
                for index in range(total):
                    yield probe_pb2.WarmProgress(done=index, total=total)
                    reply = await self._ask(warm=engine_pb2.WarmRequest(prompt_index=index), timeout=_WARM_ONE_S)
                    if reply.error:
                        raise PeerError("the engine could not compute or keep a system prompt")
                self._facts.warmed = True
                yield probe_pb2.WarmProgress(done=total, total=total)
            finally:
                self._facts.warming = False
                self._update()

    async def recycle(self, drain_s: float) -> int:
        """Begins to drain, for at most `drain_s` seconds, and then ends the container.

        Returns:
            How many requests are in flight. A second call changes nothing more.
        """
        if self._recycle is None:
            self._facts.recycling = True
            self._update()
            in_flight = await self._drain(drain_s)
            self._recycle = asyncio.create_task(self._leave(drain_s if in_flight else 0.0))
        return self._engine.running + self._engine.waiting

    async def _drain(self, drain_s: float) -> int:
        try:
            reply = await self._ask(drain=engine_pb2.DrainRequest(deadline_ms=int(drain_s * 1000)))
        except PeerError as error:
            log.failure("recycle.no-engine", error)  # nothing to wait for
            return 0
        self._engine = reply.status
        return self._engine.running + self._engine.waiting

    async def _leave(self, drain_s: float) -> None:
        deadline = time.monotonic() + drain_s + _DRAIN_GRACE_S
        try:
            while drain_s and not self._facts.gone and time.monotonic() < deadline:
                self._engine = (await self._ask(status=engine_pb2.StatusRequest())).status
                if self._engine.running + self._engine.waiting == 0:
                    break
                await asyncio.sleep(_DRAIN_POLL_S)
        except PeerError as error:
            log.failure("recycle.engine-lost", error)
        log.event("recycle.drained", running=self._engine.running, waiting=self._engine.waiting)
        self._exit_now()

    async def _start_deadline(self) -> None:
        await asyncio.sleep(self._config.probe.start_deadline_s)
        self._facts.late = True
        self._update()

    async def _wait_for_engine(self) -> DeathNotice:
        while True:
            try:
                notice = await DeathNotice.connect(self._config.sockets.kv, timeout=_ANSWER_S)
            except PeerError:
                await asyncio.sleep(_RETRY_S)
                continue
            if notice.hello.instance_id == self._instance_id:
                break
            notice.close()  # the runtime before this one, on its way out
            await asyncio.sleep(_RETRY_S)
        self._facts.connected = True
        notice.watch(self._engine_gone)
        self._update()
        return notice

    def _engine_gone(self) -> None:
        self._facts.gone = True
        self._update()

    async def _fly_canaries(self) -> None:
        settings = self._config.probe
        tokenizer = self._bundle.manifest.tokenizer
        token = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.end_of_turn_ids[0]
        async with TritonClient(self._config.sockets.triton) as client:
            await self._wait_for_triton(client)
            await self._look()  # so that whoever hears first that it is ready hears also what it is
            while True:
                if not self._facts.recycling and not self._facts.gone:
                    self._facts.note(await self._fly(client, token))
                    self._update()
                wait = settings.canary_interval_s if self._facts.canary and self._facts.canary.ok else _CANARY_RETRY_S
                await asyncio.sleep(wait)

    async def _fly(self, client: TritonClient, token: int) -> CanaryResult:
        began, deadline = time.monotonic(), self._config.probe.canary_deadline_s
        result = await fly(client, token, deadline_s=deadline)
        if result.error == TIMEOUT:
            flown = time.monotonic() - began
            with suppress(PeerError):
                self._engine = (await self._ask(status=engine_pb2.StatusRequest(), timeout=deadline)).status
                # The answer is younger than the question: a step that is no older than the flight was within it.
                result = replace(result, progress=self._engine.last_step_age_s < flown)
        if result.error:
            log.event("canary.failed", reason="canary-late" if result.late else result.error)
        return result

    async def _wait_for_triton(self, client: TritonClient) -> None:
        # kv.sock opens while Triton still loads the model; a canary before that would only wait.
        while not (self._facts.gone or await client.ready(timeout=_ANSWER_S)):  # noqa: ASYNC110 (nobody sets an event)
            await asyncio.sleep(_RETRY_S)

    async def _ask_status(self) -> None:
        sockets = self._config.sockets
        while True:
            reachable = all(path.is_socket() for path in (sockets.kv, sockets.engine, sockets.triton))
            if self._facts.flown and self._facts.unreachable is reachable:
                self._facts.unreachable = not reachable
                self._update()
            await self._look()
            await asyncio.sleep(_STATUS_S)

    async def _look(self) -> None:
        """How the engine is, if it answers."""
        with suppress(PeerError):
            self._engine = (await self._ask(status=engine_pb2.StatusRequest())).status

    async def _ask(
        self,
        *,
        status: engine_pb2.StatusRequest | None = None,
        drain: engine_pb2.DrainRequest | None = None,
        warm: engine_pb2.WarmRequest | None = None,
        timeout: float = _ANSWER_S,
    ) -> engine_pb2.EngineReply:
        request = engine_pb2.EngineRequest(status=status, drain=drain, warm=warm)
        reply = await ask(self._config.sockets.engine, request, timeout=timeout)
        if reply.status.instance_id != self._instance_id:
            raise PeerDiedError("another engine answers")
        return reply

    def _update(self) -> None:
        said = judge(self._facts)
        if said[0] == probe_pb2.STATE_READY:
            self._facts.was_ready = True
        if said != self._said:
            log.event(
                "probe.state",
                from_state=probe_pb2.State.Name(self._said[0]),
                to_state=probe_pb2.State.Name(said[0]),
                reason=said[1],
            )
            self._said = said
        self._changed.set()
        self._changed = asyncio.Event()


def _told(canary: CanaryResult, now: float) -> probe_pb2.Canary:
    return probe_pb2.Canary(
        ok=canary.ok or canary.late,
        age_s=now - canary.at,
        latency_s=canary.latency_s,
        error="canary-late" if canary.late else canary.error,
    )


def instance_from_environment() -> str:
    """The instance id that the container's launcher gave to all its programs; random when started alone."""
    return os.environ.get("TIE_INSTANCE_ID", "")
