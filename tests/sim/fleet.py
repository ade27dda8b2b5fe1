"""A fleet that booted together, for a month: when do its nodes recycle?

    python tests/sim/fleet.py                 # 10,000 nodes, 30 days
    python tests/sim/fleet.py --nodes 500 --days 2 --controllers 5

First some whole controllers (tests/sim/world.py) live through the month: how long their recycles take, and that no
runtime lives longer than it may. Then the whole fleet, each node with the controller's own timer and with recycles as
long as those. Exit code 1 when a minute has more than 3 times the mean, or a runtime lived too long.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from world import World

from controllerd.recycle_timer import RecycleTimer
from tie.daemon.config import ControllerConfig

_BOOT_SPREAD_S = 60.0  # a fleet that boots "together" still needs a minute
_BARS = 60
_LOOK_S = 5.0


def controllers(count: int, days: float, settings: ControllerConfig, seed: int) -> tuple[list[float], float, int]:
    """Whole controllers: how long their recycles took, the longest life of a runtime, and how many recycles."""
    took: list[float] = []
    longest, total = 0.0, 0
    for number in range(count):
        world = World(settings, seed * 100_000 + number, look_s=_LOOK_S)
        for _ in range(int(days * 24)):
            world.run(3600.0)
            if world.mind.recycle is not None and world.mind.recycle.ended is not None:
                took.append(world.mind.last_recycle_s)
        longest, total = max(longest, *world.lives), total + len(world.lives)
    return took, longest, total


def fleet(nodes: int, days: float, settings: ControllerConfig, took: list[float], seed: int) -> list[int]:
    """Recycles begun in each minute."""
    draw = random.Random(seed)  # noqa: S311 (replayable)
    minutes = [0] * int(days * 24 * 60)
    end = len(minutes) * 60.0
    for _ in range(nodes):
        timer = RecycleTimer(settings.recycle_interval_s, settings.recycle_jitter, lambda: draw.uniform(-1.0, 1.0))
        now = draw.uniform(0.0, _BOOT_SPREAD_S)
        while True:
            timer.start(now)
            now += timer.remaining(now) or 0.0
            if now >= end:
                break
            minutes[int(now // 60)] += 1
            now += took[int(draw.random() * len(took))]
    return minutes


def plot(minutes: list[int], hours: int) -> str:
    """The first hours, a line for every five minutes, and the mean as a mark."""
    mean = sum(minutes) / len(minutes)
    top = 3 * mean
    lines = [f"recycles a minute: | is the mean ({mean:.1f}), the right edge three times that"]
    for start in range(0, min(len(minutes), hours * 60), 5):
        part = minutes[start : start + 5]
        low, high = min(part), max(part)
        bar = [
            "#" if cell <= low / top * _BARS else "+" if cell <= high / top * _BARS else " "
            for cell in range(1, _BARS + 1)
        ]
        mark = round(_BARS / 3) - 1
        bar[mark] = "|"
        lines.append(f"{start // 60:3d}:{start % 60:02d} {''.join(bar)}| {low} to {high}")
    return "\n".join(lines)


def main() -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--controllers", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    settings = ControllerConfig()
    allowed = settings.recycle_interval_s * (1 + settings.recycle_jitter)
    took, longest, total = controllers(arguments.controllers, arguments.days, settings, arguments.seed)
    print(f"{arguments.controllers} controllers, {arguments.days:g} days: {total} recycles")
    print(
        f"  of {min(took):.1f} to {max(took):.1f} s; a runtime lived {longest:.1f} s at most, allowed {allowed:.1f} s"
    )
    minutes = fleet(arguments.nodes, arguments.days, settings, took, arguments.seed)
    mean, most = sum(minutes) / len(minutes), max(minutes)
    print(f"{arguments.nodes} nodes, {arguments.days:g} days: {sum(minutes)} recycles, {mean:.1f} a minute on average,")
    print(f"  at most {most} in minute {minutes.index(most)}: {most / mean:.2f} times the mean; seed {arguments.seed}")
    print(plot(minutes, hours=6))
    later = minutes[len(minutes) // 2 :]
    print(f"second half: {min(later)} to {max(later)} a minute, at most {max(later) / mean:.2f} times the mean")
    return 0 if most <= 3 * mean and longest <= allowed + _LOOK_S else 1


if __name__ == "__main__":
    sys.exit(main())
