"""kill -9 of an app, a runtime or the store at random moments, and what the others make of it.

    python tests/fuzz/kills.py [--victim app|runtime|store] [--kills 200] [--seed 1]

The app is producer of imports and consumer of exports, the runtime the other way round. After each kill the survivor's
error must come within 100 ms, everything that belonged to the dead must be let go of, and the conversations must go on:
each restored block is compared with what was saved. The same seed kills at the same moments.
"""

import argparse
import collections
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tie.daemon import config as node_config

VICTIMS = ("app", "runtime", "store")
NOTICE_S = 0.1
DEADLINE_S = 30.0
_ROLES = Path(__file__).with_name("kill_roles.py")


class BrokenError(Exception):
    """What must not happen has happened."""


class Process:
    """One of the processes, and what it says."""

    def __init__(self, command: list[str]) -> None:
        self.phase = "start"
        self._events: collections.deque[dict] = collections.deque()
        self._said = threading.Condition()
        environment = {**os.environ, "TIE_DUMPABLE": "1", "PYTHONUNBUFFERED": "1"}
        # Logs of failures are the normal case here.
        self._popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def _read(self) -> None:
        for line in self._popen.stdout:
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            with self._said:
                self.phase = event.get("phase", self.phase)
                self._events.append(event)
                self._said.notify()

    def wait_for(self, what: str, *, value: str | None = None) -> dict:
        """The next event that has a field of this name; earlier ones are passed over."""
        deadline = time.monotonic() + DEADLINE_S
        with self._said:
            while True:
                while self._events:
                    event = self._events.popleft()
                    if "failed" in event:
                        raise BrokenError(str(event))
                    if what in event and value in (None, event[what]):
                        return event
                if not self._said.wait(max(0.0, deadline - time.monotonic())):
                    raise BrokenError(f"a process did not say {what!r} in time; it was at {self.phase!r}")

    def forget(self) -> None:
        """Drops what was said so far, failures excepted."""
        with self._said:
            failed = [event for event in self._events if "failed" in event]
            self._events.clear()
            self._events.extend(failed)

    def kill(self) -> float:
        at = time.monotonic()
        self._popen.send_signal(signal.SIGKILL)
        self._popen.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        self._popen.stdout.close()
        return at

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())


class Trio:
    """An app, a runtime and a store that work together."""

    def __init__(self, directory: Path, seed: int) -> None:
        table = node_config.StoreConfig(
            capacity_bytes=128 << 20, max_entry_bytes=16 << 20, turnover_s=0.001, connection_bytes=1 << 40,
            connection_entries=1 << 30, spare_bytes=4 << 20,
        )  # fmt: skip
        self._config = node_config.NodeConfig(run_dir=str(directory), store=table)
        self._toml = directory / "node.toml"
        self._toml.write_bytes(node_config.dump(self._config))
        self._directory = directory
        self._seed = seed
        self.all = {name: self._start(name) for name in ("store", "runtime", "app")}

    def _start(self, name: str) -> Process:
        if name == "store":
            process = Process([sys.executable, "-m", "tie.store.main", "--config", str(self._toml)])
        else:
            self._seed += 1
            arguments = [name, str(self._directory), str(self._config.sockets.store), str(self._seed)]
            process = Process([sys.executable, str(_ROLES), *arguments])
        if name == "runtime":
            process.wait_for("phase", value="up")
        elif name == "store":
            deadline = time.monotonic() + DEADLINE_S
            while not self._config.sockets.store.exists():
                if time.monotonic() > deadline:
                    raise BrokenError("the store did not start")
                time.sleep(0.005)
        return process

    def replace(self, name: str) -> None:
        """A fresh one in the place of a killed one."""
        self.all[name] = self._start(name)

    def close(self) -> None:
        for process in self.all.values():
            process.kill()


def run(victim: str, kills: int, seed: int) -> dict:
    """Kills `victim` so many times; what was measured.

    Raises:
        BrokenError: an error was missing, something was left, or something partial was taken for whole.
    """
    chance = random.Random(seed)  # noqa: S311 (when to kill)
    late: list[float] = []
    phases: collections.Counter[str] = collections.Counter()
    restored = 0
    survivor = "runtime" if victim == "app" else "app"
    with tempfile.TemporaryDirectory(prefix="tie-kills-", dir="/tmp") as directory:
        trio = Trio(Path(directory), seed)
        try:
            trio.all["app"].wait_for("turn")
            first: dict = {}
            for _ in range(kills):
                # Two turns that work; of three kills of an app two are meant to fall between `done` and the end of its
                # export, which is the shortest part of a turn and the one that must not be cut in two.
                app = trio.all["app"]
                app.forget()
                restored += sum(app.wait_for("turn")["turn"] for _ in range(2))
                inside = chance.random() < 2 / 3
                if inside:
                    app.wait_for("phase", value="save")
                time.sleep(chance.uniform(0, 0.012 if inside else 0.08))
                for process in trio.all.values():
                    process.forget()
                phases[app.phase] += 1
                at = trio.all[victim].kill()
                notice = trio.all[survivor].wait_for("error")
                late.append(notice["at"] - at)
                trio.replace(victim)
                first = first or notice
            # Everything has recovered, and nothing has been left behind.
            trio.all["app"].wait_for("turn")
            # A spare buffer may be there, or be made at this moment.
            if notice["descriptors"] > first["descriptors"] + 1 or notice["shared"] > first["shared"] + 4096:
                raise BrokenError(f"left behind: {first} became {notice}")
            held = trio.all["store"].descriptors()
        finally:
            trio.close()
    return {"late": late, "phases": phases, "restored": restored, "first": first, "last": notice, "store": held}


def main() -> None:
    """Runs it and prints one line for each victim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--victim", choices=VICTIMS)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for victim in [arguments.victim] if arguments.victim else VICTIMS:
        result = run(victim, arguments.kills, arguments.seed)
        late = sorted(result["late"])
        print(
            f"{victim}: {len(late)} kills, seed {arguments.seed}; the error came after "
            f"{statistics.median(late) * 1e3:.1f} ms (median), {late[-1] * 1e3:.1f} ms (worst), "
            f"{sum(each > NOTICE_S for each in late)} over {NOTICE_S * 1e3:.0f} ms; "
            f"{result['restored']} blocks restored, none wrong; killed in {dict(result['phases'])}; "
            f"descriptors {result['first']['descriptors']} -> {result['last']['descriptors']}, "
            f"shared KiB {result['first']['shared']} -> {result['last']['shared']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
