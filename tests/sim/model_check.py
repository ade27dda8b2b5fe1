"""Drives the controller's mind through random events in any order and checks what must always hold.

    python tests/sim/model_check.py --steps 1000000      # some minutes
    python tests/sim/model_check.py --steps 20000 --seed 4711

A run is a chain of episodes, each replayable by its own seed, which a failure names. In an episode the peers first say
anything at all, in any order, with any time between; then they behave, and the node has to come back; or they keep
failing, and it has to give up. Invariants:

1. Available means: hardware fit and freshly looked at, owner ready and the same, runtime ready with a passed canary,
   warmed and not the one to go, attached to CloudBoard, whose key service answers, no maintenance.
2. Never two recycles at once.
3. The runtime is told to go only when "busy" was acknowledged, CloudBoard is gone, or its deadline has passed.
4. Peers that behave bring the node back within a bound; peers that never do bring it to give up within one.
5. A recycle that was asked for is carried out: it ends, and the runtime that was to go is not what serves afterwards.
"""

import argparse
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from world import GPU, OWNER, World

from controllerd.endurance import SOON_S
from controllerd.facts import Gpu, Owner, Runtime
from controllerd.happening import Happening
from controllerd.recycle import Tell
from controllerd.states import State
from tie.daemon.config import ControllerConfig

SETTINGS = ControllerConfig(
    recycle_interval_s=3600.0,
    drain_deadline_s=30.0,
    busy_ack_deadline_s=5.0,
    fresh_runtime_deadline_s=60.0,
    error_grace_s=5.0,
    error_backoff_s=10.0,
    error_attempts=3,
    give_up_s=3600.0,
)
_BACK_S = 900.0  # longest: back-off, busy, drain, waiting for a fresh runtime, its start, the hold after flapping
_GIVE_UP_S = 3700.0
_CHAOS_STEPS = 200

RUNTIME_STATES = ("initializing", "ready", "ready", "ready", "in-error", "recycling", "unknown")


class ViolationError(AssertionError):
    """An invariant does not hold."""


class Checked(World):
    """A world whose every step is checked, and whose peers may be made to say anything."""

    def __init__(self, seed: int) -> None:
        self.steps = 0
        self._told: list[Happening] = []
        self._began = 0.0
        self._acknowledged = False
        self._records: list[object] = []
        super().__init__(SETTINGS, seed, look_s=0.5)

    # ---- the checks ----

    def look(self) -> None:
        super().look()
        facts, mind = self.facts(), self.mind
        self._acknowledged |= facts.busy_acknowledged or not facts.cloudboard
        if mind.state is State.AVAILABLE:
            self._require_available(facts.runtime, facts.gpu, facts.owner)
        if (mind.procedure is not None) != (mind.state is State.DRAINING):
            raise ViolationError("a recycle's phases run beside another state than draining")
        if mind.moving and (mind.recycle is None or mind.recycle.finished):
            raise ViolationError("moving without a recycle")

    def _require_available(self, runtime: Runtime | None, gpu: Gpu | None, owner: Owner | None) -> None:
        memory = self.mind.memory
        checks = {
            "gpu": gpu is not None and gpu.fit and gpu.fresh and not gpu.starting,
            "owner": owner is not None and owner.state == "ready" and not memory.owner_changed,
            "runtime": runtime is not None and runtime.ready and runtime.canary_ok,
            "fresh": runtime is not None and runtime.instance_id != memory.stale_instance,
            "warm": runtime is not None and runtime.instance_id == memory.warmed_instance,
            "attached": self.attached,
            "keys": self.keys,
            "maintenance": not memory.maintenance,
        }
        failed = [name for name, holds in checks.items() if not holds]
        if failed:
            raise ViolationError(f"available without {failed}")

    def _happened(self, happening: Happening) -> None:
        super()._happened(happening)
        if happening.kind == "recycle":
            if self._told and self._told[-1].kind == "recycle":
                raise ViolationError("a second recycle began before the first had ended")
            self._began, self._acknowledged = self.now, False
        if happening.kind in {"recycle", "recycled"}:
            self._told.append(happening)
            del self._told[:-4]

    def _carry_out(self, command: object) -> None:
        if isinstance(command, Tell):
            facts = self.facts()
            free = self._acknowledged or facts.busy_acknowledged or not facts.cloudboard
            if not free and self.now < self._began + SETTINGS.busy_ack_deadline_s:
                raise ViolationError("the runtime was told to go before busy was acknowledged")
            if self.mind.state is not State.DRAINING:
                raise ViolationError(f"the runtime was told to go in {self.mind.state.name}")
        super()._carry_out(command)  # type: ignore[arg-type]

    # ---- anything at all ----

    def anything(self) -> None:
        """One event of any kind."""
        self.steps += 1
        draw = self.random
        match draw.randrange(14):
            case 0:
                self.runtime = None
            case 1 | 2:
                self.runtime = Runtime(
                    f"runtime-{draw.choice('abcd')}",
                    (state := draw.choice(RUNTIME_STATES)) == "ready",
                    state,
                    draw.random() < 0.8,
                    draw.random() < 0.3,
                    "m", "r", draw.randrange(3), draw.uniform(0, 8000), draw.choice((0, 1, 1, 2)),
                    may_heal=draw.random() < 0.3,
                )  # fmt: skip
            case 3:
                self.change_runtime(ready=False, state="in-error")
            case 4:
                self.gpu = draw.choice(
                    (
                        None,
                        GPU,
                        GPU,
                        replace(GPU, fit=False),
                        replace(GPU, fresh=False),
                        replace(GPU, advises_recycle=True),
                    )
                )
            case 5:
                self.owner = draw.choice(
                    (None, OWNER, OWNER, Owner("other", 1, "ready"), Owner("owner-0", 2, "loading"))
                )
            case 6:
                self.attached, self.keys = draw.random() < 0.7, draw.random() < 0.8
            case 7:
                self.in_flight = draw.randrange(4)
            case 8:
                self._busy_acknowledged = draw.random() < 0.5
            case 9:
                if draw.random() < 0.5:
                    self.ask()
            case 10:
                self.mind.set_maintenance(self.now, on=draw.random() < 0.4)
            case 11 | 12:
                self._well()
            case _:
                self.now += draw.choice((0.0, 0.01, 0.3, 2.0, 20.0, 200.0, 4000.0))
        if draw.random() < 0.8:
            self.look()

    def _well(self) -> None:
        """All is well for a moment, so that there is something to lose."""
        self.gpu, self.attached, self.keys, self.in_flight = GPU, True, True, 0
        self.owner = self.random.choice((OWNER, Owner("other", 1, "ready")))
        name = self.runtime.instance_id if self.runtime is not None else f"runtime-{self.random.choice('abcd')}"
        self.runtime = Runtime(name, True, "ready", True, True, "m", "r", 0, 100.0, self.owner.generation)

    def ask(self) -> None:
        """An operator's recycle; it must end."""
        self._records.append(self.mind.request_recycle(self.now, "operator", self.random.choice((None, 0.0, 3.0))))

    # ---- and order again ----

    def behave(self) -> None:
        """From now on every peer does its part."""
        self.gpu, self.attached, self.keys, self.in_flight, self.broken = GPU, True, True, 0, False
        self.owner = self.owner if self.owner is not None and self.owner.state == "ready" else replace(OWNER)
        self.mind.set_maintenance(self.now, on=False)
        if self.runtime is None or not self.runtime.instance_id.startswith("runtime-") or self.random.random() < 0.5:
            self.end_runtime()
        elif self.runtime.state == "initializing":
            self._runtime_ready(self.runtime.instance_id)
        elif self.runtime.state == "recycling":
            self.end_runtime()
        self.change_runtime(canary_ok=True)
        self.at(0.0, self._acknowledge)

    def require_return(self) -> None:
        """The node is back within the bound, or says that it gives up because of a runtime that nobody mends."""
        mind, deadline = self.mind, self.now + _BACK_S
        while self.now < deadline and mind.state is not State.AVAILABLE:
            self.run(5.0)
        stuck = mind.endurance.given_up and self.runtime is not None and self.runtime.state == "in-error"
        if mind.state is not State.AVAILABLE and not stuck:
            raise ViolationError(f"not back: {mind.state.name} {mind.reasons} {self.facts()}")
        if not stuck:
            self._require_records()

    def _require_records(self) -> None:
        for record in self._records:
            if not record.finished:  # type: ignore[attr-defined]
                raise ViolationError(f"a recycle that was asked for has not ended: {record}")
        self._records.clear()

    def require_giving_up(self) -> None:
        """Runtimes that never come up bring the node to give up within the bound."""
        self.run(2 * SOON_S)  # peace, after which the counts begin anew
        self.happened.clear()
        self.broken = True
        if self.runtime is not None:
            self.end_runtime()
        self.run(_GIVE_UP_S)
        ladder = [(entry.kind, entry.code) for entry in self.happened if entry.kind in {"owner", "given-up"}]
        if not self.mind.endurance.given_up or self.mind.state is State.AVAILABLE:
            raise ViolationError(f"no end: {self.mind.state.name} {self.mind.reasons}")
        if ladder[-2:] != [("owner", "asked-to-end"), ("given-up", "recycles-in-vain")]:
            raise ViolationError(f"another ladder: {ladder}")
        self.broken = False
        self.ask()  # what an operator does then
        self.require_return()


def episode(seed: int) -> int:
    """One episode; how many events it had."""
    world = Checked(seed)
    for _ in range(_CHAOS_STEPS):
        world.anything()
    world.behave()
    world.require_return()
    if seed % 16 == 0:
        world.require_giving_up()
    return world.steps


def main() -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 40))
    arguments = parser.parse_args()
    began, steps, seed = time.monotonic(), 0, arguments.seed
    while steps < arguments.steps:
        try:
            steps += episode(seed)
        except ViolationError as error:
            print(f"seed {seed}: {error}\nreplay: python tests/sim/model_check.py --steps 1 --seed {seed}")
            return 1
        seed += 1
    episodes, elapsed = seed - arguments.seed, time.monotonic() - began
    print(f"{steps} steps in {episodes} episodes from seed {arguments.seed}: every invariant held ({elapsed:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
