"""The whole decision loop over any history of facts: never available without every gate, and never at a dead end."""

import asyncio
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from controllerd.controller import Controller
from controllerd.facts import Facts, Gpu, Owner, Runtime
from controllerd.gates import assess
from controllerd.recycle import RecycleRecord
from controllerd.recycle_timer import RecycleTimer
from controllerd.states import Event, State
from tie.daemon.config import ControllerConfig, NodeConfig

GPU = Gpu(fit=True, fresh=True, advises_recycle=False)
OWNER = Owner("o", 1, "ready")


def runtime(instance: str, state: str, *, canary_ok: bool = True, warmed: bool = False) -> Runtime:
    return Runtime(
        instance_id=instance,
        ready=state == "ready",
        state=state,
        canary_ok=canary_ok,
        warmed=warmed,
        model="m",
        release="r",
        running=0,
        uptime_s=1.0,
        owner_generation=1,
    )


facts = st.builds(
    Facts,
    runtime=st.none()
    | st.builds(
        runtime,
        st.sampled_from("abcd"),
        st.sampled_from(["initializing", "ready", "ready", "ready", "in-error", "recycling"]),
        canary_ok=st.sampled_from([True, True, False]),
        warmed=st.booleans(),
    ),
    gpu=st.none() | st.sampled_from([GPU, GPU, replace(GPU, fit=False), replace(GPU, advises_recycle=True)]),
    owner=st.none() | st.sampled_from([OWNER, OWNER, Owner("p", 1, "ready"), Owner("o", 2, "loading")]),
    cloudboard=st.sampled_from([True, True, False]),
)
asks = st.sampled_from(["", "", "", "recycle", "on", "off"])


class Node(Controller):
    """A controller whose peers are facts: recycles drain at once, warming succeeds at once."""

    def __init__(self, run_dir: Path) -> None:
        self.now = 1000.0
        config = NodeConfig(run_dir=str(run_dir), controller=ControllerConfig(fresh_runtime_deadline_s=60.0))
        config.sockets.control.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(config, clock=lambda: self.now, timer=RecycleTimer(500.0, 0.0))

    async def _carry_out(self, recycle: RecycleRecord, drain_s: float) -> None:
        assert drain_s > 0
        self.memory = replace(self.memory, stale_instance=recycle.old_instance or None)
        self._apply(Event.DRAINED, recycle.reason)

    async def _warm(self, instance: str) -> None:
        self.memory = replace(self.memory, warmed_instance=instance)

    async def see(self, seen: Facts, seconds: float) -> None:
        self.now += seconds
        self.probe.facts, self.gpu.facts, self.owner.facts = seen.runtime, seen.gpu, seen.owner
        self.cloudboard.attached = seen.cloudboard
        for _ in range(6):
            self.look()
            if self.state is State.AVAILABLE:
                assert assess(seen, self.memory).ready
            await asyncio.sleep(0)


async def _live(run_dir: Path, steps: list[tuple[Facts, float, str]]) -> None:
    node = Node(run_dir)
    async with node._tasks:
        for seen, seconds, ask in steps:
            if ask == "recycle":
                node.request_recycle("operator")
            elif ask:
                node.set_maintenance(on=ask == "on")
            await node.see(seen, seconds)
        node.set_maintenance(on=False)
        for number in range(4):
            # Whatever happened: peers that are well, and a runtime that is replaced when it is told to go.
            good = Facts(runtime(f"good-{number}", "ready"), GPU, OWNER, cloudboard=True)
            await node.see(good, 150.0)
            if node.state is State.AVAILABLE:
                return
        raise AssertionError(f"a dead end: {node.state.name}, {node.readiness.reasons}")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(facts, st.floats(0.1, 200), asks), max_size=25))
def test_from_any_history_the_node_comes_back(tmp_path_factory, steps: list[tuple[Facts, float, str]]) -> None:
    asyncio.run(_live(tmp_path_factory.mktemp("n"), steps))
