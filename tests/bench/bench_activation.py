"""How soon an app is there: cold, standing by, and sixty at once; its real unit, under real systemd.

python tests/bench/bench_activation.py [--cold 40] [--rounds 96] [--burst 60] [--json FILE]      as root

Boots a container as tests/system does, installs the demo node in it, and measures inside:

- cold: from connecting to the app's socket until it says `ready`, and how much of it systemd, the sandbox, and the app
  itself take (the unit's own time stamps);
- standing by: from the request to the first token's text, through an app that was connected ahead of time, and to the
  first token from Triton, of the same prompts by turns; the app's rounds once without its clock (`app.tick_s = 0`: what
  the path costs) and once with it (on which the first text waits for the next tick, for privacy); and how long it takes
  after the end, when the app files the conversation, until it is gone;
- a burst: all connect at once, all ask once all are ready; who was refused, and what memory they have together.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import aclosing, contextmanager
from pathlib import Path

from tie.assets.bundle import open_bundle
from tie.assets.chat import ChatMessage, ChatTemplate
from tie.cli.bench_prompts import random_prompts
from tie.daemon import config as node_config
from tie.daemon.frames import read_message, write_message
from tie.daemon.triton import TritonClient
from tie.proto import app_pb2, request_pb2, runtime_pb2

ROOT = Path(__file__).parents[2]
CONFIG = Path("/etc/tie/node.toml")
PYTHON = "/opt/tie/bin/python"
WAIT_S = 120.0
PROMPT_TOKENS = 32
TOKENS = 4
AHEAD = 8  # apps that stand by at the same time
SETTLED_S = 1.5  # after the last `ready`: an app loads one more library then
PARTS = ("systemd", "sandbox", "app")


class App:
    """One connection to the app's socket, and the process behind it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begun: float) -> None:
        self._reader, self._writer, self.begun = reader, writer, begun
        self.ready_s = 0.0

    @classmethod
    async def connect(cls, config: node_config.NodeConfig) -> "App":
        begun = time.monotonic()
        return cls(*await asyncio.open_unix_connection(config.sockets.app), begun)

    async def ready(self) -> "App | None":
        """Waits until it is; None: it was refused."""
        try:
            message = await read_message(self._reader, app_pb2.AppOut, limit=1 << 20, timeout=WAIT_S)
        except ConnectionError:
            message = None
        if message is None or not message.HasField("ready"):
            return None
        self.ready_s = time.monotonic() - self.begun
        return self

    async def first_text(self, prompt: list[dict[str, str]], model: str) -> float:
        """Asks; seconds until the first text. Reads the answer to its end.

        Raises:
            SystemExit: it was not answered.
        """
        asked = request_pb2.InferenceRequest(
            model=model, max_tokens=TOKENS, ignore_eos=True,
            messages=[
                request_pb2.Message(role=message["role"], parts=[request_pb2.Part(text=message["content"])])
                for message in prompt
            ],
        )  # fmt: skip
        opened = app_pb2.Open(request_id="bench", dek=os.urandom(32), model=model)
        body = app_pb2.Body(data=asked.SerializeToString(), last=True)
        first = 0.0
        begun = time.monotonic()
        await write_message(self._writer, app_pb2.AppIn(open=opened), timeout=WAIT_S)
        await write_message(self._writer, app_pb2.AppIn(body=body), timeout=WAIT_S)
        while (message := await read_message(self._reader, app_pb2.AppOut, limit=1 << 20, timeout=WAIT_S)) is not None:
            if message.HasField("delta"):
                first = first or time.monotonic() - begun
            elif message.HasField("done"):
                if message.done.status != app_pb2.STATUS_OK or not first:
                    raise SystemExit(f"no answer: {app_pb2.Status.Name(message.done.status)}")
                return first
        raise SystemExit("the app ended without a word")

    async def end(self) -> None:
        """Closes the connection and waits until the process has ended."""
        self._writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            while await self._reader.read(1 << 16):
                pass
        self._writer.close()


async def cold(config: node_config.NodeConfig, count: int) -> list[dict[str, float]]:
    """Seconds from connecting to `ready`, one after the other, and their parts."""
    figures = []
    for _ in range(count):
        app = await App.connect(config)
        if await app.ready() is None:
            raise SystemExit("the app refused")
        forked, executed = unit_times()
        parts = (forked - app.begun, executed - forked, app.begun + app.ready_s - executed)
        figures.append({"ready": app.ready_s, **dict(zip(PARTS, parts, strict=True))})
        await app.end()
        await asyncio.sleep(0.3)  # systemd tidies up
    return figures


def unit_times() -> tuple[float, float]:
    """When systemd forked the one running instance that this process connected to, and when that became the app."""
    names = ("ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic")
    lines = shown(f"tie-cloud-app@*-{os.getpid()}-0.service", *names)
    # The last, where systemd has not forgotten the one before.
    forked, executed = (max(int(line.split("=")[1]) for line in lines if name in line) for name in names)
    return forked / 1e6, executed / 1e6


def shown(unit: str, *properties: str) -> list[str]:
    command = ["systemctl", "show", unit, f"--property={','.join(properties)}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout.split()


async def standing_by(config: node_config.NodeConfig, rounds: int, seed: int) -> list[dict[str, float]]:
    """Seconds to the first token of the same prompt, from an app that stands by and from Triton, by turns."""
    bundle = open_bundle(Path(config.model.bundle))
    template, model = ChatTemplate.load(bundle), bundle.manifest.model
    prompts = random_prompts(PROMPT_TOKENS, seed)
    figures: list[dict[str, float]] = []
    async with TritonClient(config.sockets.triton) as triton:
        if not await triton.ready(timeout=WAIT_S):
            raise SystemExit("Triton does not answer")
        while len(figures) < rounds:
            apps = []
            for _ in range(min(AHEAD, rounds - len(figures))):
                app = await App.connect(config)
                apps.append(app)
                if await app.ready() is None:
                    raise SystemExit("the app refused")
            await asyncio.sleep(SETTLED_S)
            for app in apps:
                messages = next(prompts).messages
                ids = template.encode([ChatMessage(role=entry["role"], content=entry["content"]) for entry in messages])
                figure, its_group = {}, groups()[0]
                for way in ("triton", "app") if len(figures) % 2 else ("app", "triton"):
                    if way == "triton":
                        figure[way] = await first_token(triton, ids)
                    else:
                        figure[way] = await app.first_text(messages, model)
                        figure["gone"] = await gone(its_group)
                    await asyncio.sleep(0.05)
                await app.end()
                figures.append(figure)
    return figures


def groups() -> list[Path]:
    """The cgroups of the instances that this process has connected to and that are there still, oldest first."""
    found = Path("/sys/fs/cgroup").glob(f"**/tie-cloud-app@*-{os.getpid()}-0.service")
    return sorted(found, key=lambda path: int(path.name.split("@")[1].split("-")[0]))


async def gone(group: Path) -> float:
    """Seconds from here until a cgroup, and all in it, has been removed."""
    begun = time.monotonic()
    async with asyncio.timeout(WAIT_S):
        while group.exists():
            await asyncio.sleep(0.0005)
    return time.monotonic() - begun


async def first_token(triton: TritonClient, ids: list[int]) -> float:
    request = runtime_pb2.GenerateRequest(
        token_ids=ids, sampling=runtime_pb2.Sampling(temperature=1.0), max_tokens=TOKENS, ignore_eos=True
    )
    first = 0.0
    begun = time.monotonic()
    async with aclosing(triton.generate(request, timeout=WAIT_S)) as events:
        async for event in events:
            if event.HasField("tokens"):
                first = first or time.monotonic() - begun
    if not first:
        raise SystemExit("Triton did not answer")
    return first


async def burst(config: node_config.NodeConfig, count: int, seed: int) -> dict[str, object]:
    """All at once."""
    model = open_bundle(Path(config.model.bundle)).manifest.model
    begun = time.monotonic()
    apps = await asyncio.gather(*(App.connect(config) for _ in range(count)))
    ready = [app for app in await asyncio.gather(*(app.ready() for app in apps)) if app is not None]
    memory = instances_pss()
    prompts = random_prompts(PROMPT_TOKENS, seed)
    asked = time.monotonic()
    firsts = await asyncio.gather(*(app.first_text(next(prompts).messages, model) for app in ready))
    answered = time.monotonic() - asked
    await asyncio.gather(*(app.end() for app in ready))
    state = shown("tie-cloud-app.socket", "ActiveState", "NAccepted", "NRefused")
    return {
        "connected": count, "ready": len(ready), "ready_s": sorted(app.ready_s for app in ready),
        "first_s": sorted(firsts), "answered_s": answered, "took_s": time.monotonic() - begun, "socket": state,
        "pss_mib": memory, "slice_mib": int(0.4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20),
    }  # fmt: skip


def instances_pss() -> list[float]:
    """MiB that each instance has, with its share of what it shares with others."""
    found = []
    for group in groups():
        for pid in (group / "cgroup.procs").read_text().split():
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found.append(next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")))
    return found


@contextmanager
def without_tick():
    """The app's clock stands still, for the instances that start meanwhile."""
    text = CONFIG.read_text()
    CONFIG.write_text(text + "\n[app]\ntick_s = 0.0\n")
    try:
        yield
    finally:
        CONFIG.write_text(text)


async def inside(arguments: argparse.Namespace) -> dict[str, object]:
    config = node_config.load(CONFIG)
    await cold(config, 3)  # files are in memory now
    figures: dict[str, object] = {"cold": await cold(config, arguments.cold)}
    with without_tick():
        figures["standing by"] = await standing_by(config, arguments.rounds, 1)
    figures["standing by, with its clock"] = await standing_by(config, arguments.rounds // 2, 2)
    figures["burst"] = await burst(config, arguments.burst, 3)
    return figures


def outside(arguments: argparse.Namespace) -> dict[str, object]:
    """Boots, installs, lets this program measure inside."""
    spec = importlib.util.spec_from_file_location("systems", ROOT / "tests/system/conftest.py")
    systems = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(systems)
    tie = str(Path(sys.executable).with_name("tie"))
    with systems.boot(systems._bare, systems._bound(ROOT, str(ROOT))) as machine:
        machine.run(tie, "install", "--demo", "--start", timeout=300)

        def available() -> bool:
            said = machine.run("/opt/tie/bin/tie", "status", "--json", check=False).stdout
            return bool(said) and json.loads(said)["state"] == "available"

        systems.wait_until("the node to be available", available, 180)
        command = [PYTHON, str(Path(__file__).resolve()), "--inside", *sys.argv[1:]]
        return json.loads(machine.run(*command, timeout=900).stdout)


def report(figures: dict[str, object]) -> None:
    starts = figures["cold"]
    print(f"cold, {len(starts)} times, connect to ready, ms: {spread([start['ready'] for start in starts])}")
    for part in PARTS:
        print(f"  of it {part:8} {spread([start[part] for start in starts])}")
    for name in ("standing by", "standing by, with its clock"):
        rounds = figures[name]
        app, triton = ([figure[way] for figure in rounds] for way in ("app", "triton"))
        print(f"{name}, {len(rounds)} rounds, first token, ms: app {spread(app)}, Triton {spread(triton)}")
        added = [figure["app"] - figure["triton"] for figure in rounds]
        print(f"  p50 differs by {1e3 * (share(app, 0.5) - share(triton, 0.5)):.1f}, rounds by {spread(added)}")
        print(f"  from the answer's end until process and cgroup are gone: {spread([one['gone'] for one in rounds])}")
    found = figures["burst"]
    memory, ready = found["pss_mib"], found["ready_s"]
    print(f"burst: {found['ready']} of {found['connected']} ready, ms: {spread(ready)}; {' '.join(found['socket'])}")
    print(f"  {sum(memory):.0f} MiB, {statistics.median(memory):.1f} each; the slice may have {found['slice_mib']}")
    print(f"  asked at once: first text, ms: {spread(found['first_s'])}; all answered in {found['answered_s']:.1f} s")


def spread(values: list[float]) -> str:
    shown = [f"{1e3 * share(values, at):.1f}" for at in (0.5, 0.99, 1.0)]
    return f"p50 {shown[0]}, p99 {shown[1]}, longest {shown[2]}"


def share(values: list[float], at: float) -> float:
    return sorted(values)[round(at * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=96)
    parser.add_argument("--burst", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(asyncio.run(inside(arguments))))
        return
    figures = outside(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    report(figures)


if __name__ == "__main__":
    main()
