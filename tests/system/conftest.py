"""A machine of its own: real systemd, booted in a container over a copy-on-write view of this machine's root.

systemd is never started on the root itself: its tmpfiles rules would empty this machine's /tmp. Every mount is made in
a mount namespace that only the container's processes live in, so that nothing can be left mounted, whatever dies.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BOOT_DEADLINE_S = 60.0
# A memory file system over this machine's root takes what the test prepared and every write.
_VIEW = """
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir "$1/work" "$1/merged"
cp -a "$2" "$1/upper"
mount -t overlay -o lowerdir=/,upperdir="$1/upper",workdir="$1/work" overlay "$1/merged"
"""
_BOOT = (
    _VIEW
    + """
shift 2
exec systemd-nspawn "$@"
"""
)
_PRIVATELY = ("unshare", "--mount", "--propagation", "private", "--", "sh", "-euc")
_TARGET = """
[Unit]
Description=What the tests need of a booted system
Requires=sysinit.target dbus.socket
After=sysinit.target dbus.socket
AllowIsolate=yes
"""


def _why_not() -> str:
    """Why this machine cannot boot a container, or nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root"
    for tool in ("systemd-nspawn", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"needs {tool}" + (" (package systemd-container)" if tool == "systemd-nspawn" else "")
    if not _system_python().exists():
        return f"needs {_system_python()}: the units see /usr only"
    with tempfile.TemporaryDirectory(prefix="tie-system-", dir="/tmp") as folder:
        (Path(folder) / "layer").mkdir()
        (Path(folder) / "view").mkdir()
        tried = subprocess.run(
            [*_PRIVATELY, _VIEW, "sh", f"{folder}/view", f"{folder}/layer"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    return f"may not mount here: {tried.stderr.strip()}" if tried.returncode != 0 else ""


def _system_python() -> Path:
    return Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")


class Machine:
    """A booted container."""

    def __init__(self, nspawn: subprocess.Popen[bytes], log: Path) -> None:
        self._nspawn = nspawn
        self._log = log
        self._leader = 0

    def wait_booted(self) -> None:
        """Waits until its systemd answers.

        Raises:
            RuntimeError: it did not come up; the message has the console's last lines.
        """
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children")
        deadline = time.monotonic() + BOOT_DEADLINE_S
        while time.monotonic() < deadline and self._nspawn.poll() is None:
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd":
                    self._leader = int(pid)
                    state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
                    if state in ("running", "degraded"):
                        return
            time.sleep(0.1)
        raise RuntimeError(f"the container did not boot: {self._log.read_text(errors='replace')[-2000:]}")

    def run(
        self, *argv: str, check: bool = True, stdin: str = "", timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command inside, as root."""
        done = subprocess.run(
            ["nsenter", "-t", str(self._leader), "-a", "--", *argv],
            input=stdin, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(f"{argv} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def from_outside(self, *argv: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command of this machine, with its files, that sees nothing of the container but its network."""
        return subprocess.run(
            ["nsenter", f"--net=/proc/{self._leader}/ns/net", "--", *argv],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def path(self, inside: str) -> Path:
        """Where a path of the container is seen from outside."""
        return Path(f"/proc/{self._leader}/root{inside}")

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Properties of a unit, by name."""
        text = self.run("systemctl", "show", unit, *(f"--property={name}" for name in properties)).stdout
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def journal(self, unit: str) -> str:
        """What a unit, and systemd about it, wrote."""
        # It fails where there is nothing yet.
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit, check=False).stdout

    def instances(self, template: str) -> list[str]:
        """The loaded instances of a template such as "tie-cloud-app@"."""
        listed = self.run("systemctl", "list-units", "--all", "--plain", "--no-legend", f"{template}*.service").stdout
        return [line.split()[0] for line in listed.splitlines() if line.strip()]

    def stop(self) -> None:
        """Ends the container and everything in it."""
        if self._nspawn.poll() is None:
            self._nspawn.send_signal(signal.SIGTERM)
            try:
                self._nspawn.wait(15)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait(15)


def wait_until(what: str, condition: Callable[[], bool], timeout: float = 30.0) -> None:
    """Polls until `condition` holds.

    Raises:
        AssertionError: it did not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what}")
        time.sleep(0.05)


def _bare(layer: Path) -> None:
    """Writes what a container needs over this machine's root to boot."""
    units = layer / "etc/systemd/system"
    units.mkdir(parents=True)
    (layer / "etc/machine-id").write_text("")
    (layer / "etc/fstab").write_text("")
    (units / "tie-test.target").write_text(_TARGET)


def _by_hand(layer: Path, config: str) -> None:
    """Writes units, accounts, configuration and interpreter, in a fraction of the time of an installation."""
    for folder in ("etc/tie", "etc/sysusers.d", "etc/tmpfiles.d", "opt/tie/bin", "opt/tie/lib"):
        (layer / folder).mkdir(parents=True)
    (layer / "etc/tie/node.toml").write_text(config)
    _bare(layer)
    units = layer / "etc/systemd/system"
    for unit in (ROOT / "systemd").iterdir():
        if unit.suffix in (".service", ".socket", ".target", ".slice"):
            shutil.copy(unit, units)
    shutil.copy(ROOT / "systemd/sysusers.d/tie.conf", layer / "etc/sysusers.d")
    shutil.copy(ROOT / "systemd/tmpfiles.d/tie.conf", layer / "etc/tmpfiles.d")
    _install(layer / "opt/tie")


def _install(prefix: Path) -> None:
    """An environment at /opt/tie with our console scripts.

    The interpreter is the system's, as on a node; the libraries of the environment that runs the tests and this source
    tree are bound in at /opt/tie/site and /opt/tie/src.
    """
    python = _system_python()
    library = prefix / "lib" / python.name / "site-packages"
    library.mkdir(parents=True)
    (library / "tie.pth").write_text("/opt/tie/src\n/opt/tie/site\n")
    (prefix / "src").mkdir()
    (prefix / "site").mkdir()
    (prefix / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")
    (prefix / "bin/python").symlink_to(python)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, entry in scripts.items():
        module, function = entry.split(":")
        script = prefix / "bin" / name
        script.write_text(f"#!/opt/tie/bin/python\nfrom {module} import {function}\n{function}()\n")
        script.chmod(0o755)


def _bound(folder: Path, inside: str) -> str:
    return f"--bind-ro={folder}:{inside}"


@contextmanager
def boot(prepare: Callable[[Path], None], *binds: str) -> Iterator[Machine]:
    """Boots a container with what `prepare` writes over this machine's root; ends it, and all in it, afterwards."""
    reason = _why_not()
    if reason:
        pytest.skip(f"NO REAL SYSTEMD WAS TESTED: {reason}")
    work = Path(tempfile.mkdtemp(prefix="tie-system-", dir="/tmp"))
    layer, view, log = work / "layer", work / "view", work / "console"
    layer.mkdir()
    view.mkdir()
    prepare(layer)
    with log.open("wb") as console:
        nspawn = subprocess.Popen(
            [
                *_PRIVATELY, _BOOT, "sh", view, layer,
                "-D", view / "merged", "--boot", "--private-network", "--register=no", "--keep-unit", "--console=pipe",
                "--quiet", "--kill-signal=SIGRTMIN+4", f"--machine=tie-{secrets.token_hex(4)}", *binds,
                "systemd.unit=tie-test.target",
            ],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console,
            env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
        )  # fmt: skip
    machine = Machine(nspawn, log)
    try:
        machine.wait_booted()
        yield machine
    finally:
        machine.stop()
        shutil.rmtree(work)


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    """One booted container for all tests that need no whole node: units and accounts, put there by hand."""
    site = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
    config = (ROOT / "systemd/node.toml").read_text()
    binds = (_bound(ROOT, "/opt/tie/src"), _bound(site, "/opt/tie/site"))
    with boot(lambda layer: _by_hand(layer, config), *binds) as booted:
        yield booted


@pytest.fixture(scope="session")
def bare_machine() -> Iterator[Machine]:
    """One with nothing of ours but this checkout and its environment, read-only, at the same path as here."""
    with boot(_bare, _bound(ROOT, str(ROOT))) as booted:
        yield booted


_DIALER = r"""
import json, socket, sys
path, word, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
connections = [socket.socket(socket.AF_UNIX) for _ in range(count)]
answers = []
for connection in connections:
    connection.settimeout(30)
    connection.connect(path)
    connection.sendall(word.encode())
for connection in connections:
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    answers.append(answer.decode())
print(json.dumps(answers))
"""


@contextmanager
def _in_the_apps_place(machine: Machine, name: str, program: str) -> Iterator[Callable[..., Any]]:
    """Starts `program` in the unit of an app, the real one but for its ExecStart=, for each connection.

    Yields:
        A function that sends a word to `count` instances at the same time and returns what was printed: their answers,
        as a JSON list.
    """
    units = machine.path("/etc/systemd/system")
    service = (ROOT / "systemd/tie-cloud-app@.service").read_text()
    socket_unit = (ROOT / "systemd/tie-cloud-app.socket").read_text()
    (units / f"{name}@.service").write_text(re.sub(r"(?m)^ExecStart=.*$", f"ExecStart=/opt/tie/bin/{name}", service))
    (units / f"{name}.socket").write_text(socket_unit.replace("app.sock", f"{name}.sock"))
    script = machine.path(f"/opt/tie/bin/{name}")
    script.write_text(program)
    script.chmod(0o755)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", f"{name}.socket")

    def dialed(word: str, count: int = 1, groups: str = "tie-edge-app", *, check: bool = True):
        return machine.run(
            "setpriv", "--reuid=tie-cloudboard", "--regid=tie-cloudboard", f"--groups={groups}", "--",
            "/opt/tie/bin/python", "-c", _DIALER, f"/run/tie/app/{name}.sock", word, str(count), check=check,
        )  # fmt: skip

    try:
        yield dialed
    finally:
        machine.run("systemctl", "stop", f"{name}.socket", f"{name}@*.service")


@pytest.fixture(scope="session")
def in_the_apps_place() -> Callable[..., Any]:
    """`_in_the_apps_place`, for the tests."""
    return _in_the_apps_place


@pytest.fixture(scope="session")
def wait() -> Callable[..., None]:
    """`wait_until`, for the tests."""
    return wait_until


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Adds what the machine said to the report of a test that failed."""
    report = yield
    booted = getattr(item, "funcargs", {}).get("bare_machine")
    if report.failed and isinstance(booted, Machine):
        said = booted.run("journalctl", "--no-pager", "-o", "short-precise", "-n", "150", check=False).stdout
        report.sections.append(("the machine's journal", said))
    return report
