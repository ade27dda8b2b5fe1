"""A node whose controller decides for real, while its clock and its peers are simulated: hours pass in milliseconds."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

from controllerd.facts import Facts, Gpu, Owner, Runtime
from controllerd.happening import Happening
from controllerd.mind import Command, EndOwner, Mind, Warm
from controllerd.recycle import Tell
from controllerd.recycle_timer import RecycleTimer
from controllerd.states import State
from tie.daemon.config import ControllerConfig

BUSY = frozenset({State.DRAINING, State.RECYCLING, State.MAINTENANCE})
GPU = Gpu(fit=True, fresh=True, advises_recycle=False)
OWNER = Owner("owner-0", 1, "ready")


class World:
    """One node and what is around it. Everything random comes from `seed`.

    Args:
        settings: the controller's.
        seed: of this world.
        look_s: how often the controller looks while it is not available; it looks at every event besides.

    Attributes:
        now: simulated seconds.
        recycled: when each recycle began.
        lives: how long each runtime lived until its recycle began.
        happened: what the controller told.
    """

    def __init__(self, settings: ControllerConfig, seed: int, look_s: float = 0.25) -> None:
        self.random = random.Random(seed)  # noqa: S311 (replayable)
        self.settings = settings
        self.now = 0.0
        self.recycled: list[float] = []
        self.lives: list[float] = []
        self.happened: list[Happening] = []
        self.runtime: Runtime | None = None
        self.gpu: Gpu | None = GPU
        self.owner: Owner | None = OWNER
        self.attached = True
        self.keys = True  # whether the key service answers
        self.in_flight = 0
        self.broken = False  # whether runtimes that start from now on come up in error
        self.mind = Mind(
            settings,
            self.now,
            self._happened,
            RecycleTimer(settings.recycle_interval_s, settings.recycle_jitter, lambda: self.random.uniform(-1.0, 1.0)),
        )
        self._look_s = look_s
        self._busy_acknowledged = False
        self._names = itertools.count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._started = 0.0
        self.at(self.random.uniform(5.0, 15.0), self.start_runtime)

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Lets something happen in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        end = self.now + seconds
        while True:
            due = self._events[0][0] if self._events else end
            if self.mind.state is State.AVAILABLE:
                remaining = self.mind.timer.remaining(self.now)
                due = min(due, end if remaining is None else self.now + remaining)
            elif self.mind.state is not State.MAINTENANCE:
                due = min(due, self.now + self._look_s)
            if due > end:
                break
            self.now = max(self.now, due)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self.look()
            if self.now >= end:
                break
        self.now = end

    def facts(self) -> Facts:
        """What the controller can know now."""
        return Facts(
            self.runtime,
            self.gpu,
            self.owner,
            self.attached,
            busy_acknowledged=self._busy_acknowledged and self.attached,
            in_flight=self.in_flight,
            keys=self.keys,
        )

    def look(self) -> None:
        """The controller looks until it has nothing more to say."""
        while True:
            before = self.mind.state
            for command in self.mind.look(self.now, self.facts()):
                self._carry_out(command)
            if self.mind.state is before:
                return
            self.at(0.005, self._acknowledge)

    # ---- peers ----

    def start_runtime(self) -> None:
        """A fresh runtime comes up."""
        self._started = self.now
        name = f"runtime-{next(self._names)}"
        state = "in-error" if self.broken else "initializing"
        generation = self.owner.generation if self.owner else 0
        self.runtime = Runtime(name, False, state, False, False, "m", "r", 0, 0.0, generation)
        if not self.broken:
            self.at(self.random.uniform(2.0, 6.0), lambda: self._runtime_ready(name))

    def end_runtime(self) -> None:
        """The runtime ends, and its supervisor starts another."""
        self.runtime = None
        self.at(0.2, self.start_runtime)

    def change_runtime(self, **fields: object) -> None:
        """The runtime says something else of itself."""
        if self.runtime is not None:
            self.runtime = replace(self.runtime, **fields)  # type: ignore[arg-type]

    def _runtime_ready(self, name: str) -> None:
        if self.runtime is not None and self.runtime.instance_id == name and self.runtime.state == "initializing":
            self.change_runtime(ready=True, state="ready", canary_ok=True)

    def _acknowledge(self) -> None:
        self._busy_acknowledged = self.mind.state in BUSY

    def _carry_out(self, command: Command) -> None:
        match command:
            case Tell(_, drain_s):
                self.at(0.001, lambda: self._hear(drain_s))
            case Warm(instance):
                self.at(0.05, lambda: self.mind.warmed(instance, done=self.runtime is not None))
            case EndOwner():
                self.at(0.001, self._end_owner)

    def _hear(self, drain_s: float) -> None:
        self.mind.told(self.now, heard=self.runtime is not None)
        if self.runtime is not None and self.runtime.state != "recycling":
            self.change_runtime(state="recycling", ready=False)
            self.at(min(drain_s, self.random.expovariate(1.0)), self.end_runtime)

    def _end_owner(self) -> None:
        heard = self.owner is not None and self.random.random() < 0.7
        self.mind.owner_asked(heard=heard)
        if heard:
            self.owner = Owner(f"owner-{next(self._names)}", 1, "loading")
            self.at(5.0, self._owner_ready)

    def _owner_ready(self) -> None:
        if self.owner is not None:
            self.owner = replace(self.owner, state="ready")

    def _happened(self, happening: Happening) -> None:
        if happening.kind == "recycle":
            self.recycled.append(self.now)
            self.lives.append(self.now - self._started)
        if happening.kind != "runtime":
            self.happened.append(happening)
            del self.happened[:-200]
