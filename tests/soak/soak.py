"""Mixed random load on a node of its own: nothing may fail, nothing may grow, nothing may leak.

python tests/soak/soak.py [--minutes 60] [--streams 8] [--seed N] [--out soak.jsonl] [--set KEY=VALUE]

Sizes from one word to most of the context, clients that go away, stop strings, schemas and grammars, several choices,
floods, bad requests; each answer is checked. What the node uses is written down every `--every` seconds. It ends by
itself, with exit code 0 when all was well: no unexpected outcome, no program restarted, no growth after the first
`--settle` minutes, and at the end no block, no descriptor and no process more than at rest.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from pathlib import Path

from soak_requests import Outcomes, Soak
from soak_watch import Moment, growth, kept_open, look, restarted

from tie.cli import asking
from tie.cli.assets import demo_bundle
from tie.cli.local_node import LocalNode
from tie.cli.settings import cache_dir
from tie.daemon.errors import TieError
from tie.device.async_client import AsyncClient
from tie.proto import control_pb2

START_S = 180.0
REST_S = 60.0  # for what is still running at the end, and for the next canary to show the ledger
LAST_ANSWERS_S = 330.0
LEAST_S = 300.0  # of looking at it after it has settled: less says nothing about growth
OVERRIDES = (
    # One runtime from beginning to end: a recycle would hide what grows.
    "controller.recycle_interval_s=1000000",
    # A canary that waits behind a flood on two cores is no error.
    "probe.canary_deadline_s=30",
)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="model bundle [default: the demo model's]")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--settle", type=float, help="minutes before growth counts [default: 10, or a third of all]")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two looks at the node")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--out", type=Path, default=Path("soak.jsonl"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


async def soaked(node: LocalNode, arguments: argparse.Namespace) -> list[str]:
    """Puts the load on the node, and gives what was wrong, in words."""
    await node.wait_for(control_pb2.STATE_AVAILABLE, START_S)
    whom = asking.target(node.run_dir, None, None, None)
    outcomes, stopping = Outcomes(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    begun = time.monotonic()
    moments: list[Moment] = []
    async with AsyncClient(whom.url, whom.statement_key) as client:
        # Drawn by a seed, so that a run can be had again; nothing here is a secret.
        sources = [random.Random(f"{arguments.seed}/{stream}") for stream in range(arguments.streams)]  # noqa: S311
        streams = [asyncio.create_task(Soak(client, whom.model, outcomes, source).run(stopping)) for source in sources]
        loop.call_later(60 * arguments.minutes, stopping.set)
        with arguments.out.open("w") as out:
            while not stopping.is_set():
                moments.append(await look(node, begun))
                out.write(json.dumps(moments[-1].as_dict() | {"outcomes": outcomes.counts}) + "\n")
                out.flush()
                print(shown(moments[-1], outcomes), flush=True)
                try:
                    async with asyncio.timeout(arguments.every):
                        await stopping.wait()
                except TimeoutError:
                    continue
        async with asyncio.timeout(LAST_ANSWERS_S):
            await asyncio.gather(*streams)
    print(json.dumps(outcomes.counts, indent=2))
    settle = 60 * (arguments.settle if arguments.settle is not None else min(10.0, arguments.minutes / 3))
    late = [moment for moment in moments if moment.t >= settle]
    wrong = outcomes.unexpected + restarted(moments) + await leaked(node, moments[0])
    if late and late[-1].t - late[0].t >= LEAST_S:
        wrong += growth(late)
    else:
        print(f"too short to speak of growth: the first {settle:.0f} s do not count")
    return wrong


async def leaked(node: LocalNode, first: Moment) -> list[str]:
    """What is still held although nothing runs any more, in words.

    Args:
        node: to be looked at.
        first: how it was before anybody asked anything.
    """
    standby = node.config.cloudboard.standby
    deadline = time.monotonic() + REST_S
    while True:
        now = await look(node, time.monotonic())
        left = [f"{now.kv['used']:.0f} KV blocks are still used"] if now.kv.get("used") else []
        left += [f"{now.kv[state]:.0f} sequences are {state}" for state in ("running", "waiting") if now.kv.get(state)]
        apps = now.passing["tie-cloud-app"]
        left += [f"{apps} apps for {standby} that stand by"] if apps > standby else []
        left += kept_open(first, now)
        if not left or time.monotonic() > deadline:
            return left if "used" in now.kv else ["the runtime shows no ledger"]
        await asyncio.sleep(1)


def shown(moment: Moment, outcomes: Outcomes) -> str:
    asked = sum(count for kind in outcomes.counts.values() for count in kind.values())
    memory = sum(moment.rss.values()) / 2**20
    blocks = f"{moment.kv.get('used', 0):.0f} of {moment.kv.get('total', 0):.0f} blocks"
    return (
        f"{moment.t:7.0f} s  {asked} requests, {len(outcomes.unexpected)} unexpected; {memory:.0f} MiB, "
        f"{sum(moment.descriptors.values())} descriptors, {moment.shm / 2**20:.1f} MiB of /dev/shm, {blocks}, "
        f"{sum(moment.passing.values())} processes of requests"
    )


def main() -> None:
    arguments = options()
    print(f"seed {arguments.seed}; what is used goes to {arguments.out}")
    bundle = arguments.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    node = LocalNode(bundle=bundle, overrides=[*OVERRIDES, *arguments.overrides])
    try:
        wrong = asyncio.run(soaked(node, arguments))
    except TieError as error:
        wrong = [f"the soak could not go on: {error}"]
    if wrong:
        print("\n".join(["", "the node's last words:", *node.log_lines()[-40:]]))
    left = node.stop()
    wrong += [f"left running: {', '.join(left)}"] if left else []
    print("\n".join(["", *(f"WRONG: {line}" for line in wrong)]) if wrong else "all was well")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
