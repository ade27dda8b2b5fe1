"""The runtime's container under real systemd: whatever in it dies, all of it goes, and systemd makes a fresh one."""

import os
import re
import signal
from pathlib import Path

import pytest

from installed_node import BACK_S, available, running, status

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("TIE_SLOW") != "1", reason="takes five minutes: TIE_SLOW=1"),
]

UNIT = "tie-afm-runtime.service"
# What each process of the container is known by.
PROGRAMS = {
    "supervisord": r"supervisord",
    "watch": r"tie\.runtime\.container watch",
    "guard": r"tie\.runtime\.container guard",
    "probe": r"status_probe\.main",
    "serve": r"tie\.runtime\.container serve",
    "triton": r"^\S*bin/tritonserver",
    "stub": r"^\S*triton_python_backend_stub",
}
# Stands in for status_probe.main in a runtime that is started while it lies there: ends at once, or when told.
SUBSTITUTE = """
import os, pathlib, signal, time
from tie.daemon.notify import notify
at_once, code = pathlib.Path(__file__).with_name("how").read_text().split()
signal.signal(signal.SIGUSR1, lambda *_: os._exit(int(code)))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if at_once == "yes":
    os._exit(int(code))
while True:
    notify("WATCHDOG=1")
    time.sleep(0.2)
"""
DROP_IN = "/run/systemd/system/tie-afm-runtime.service.d/99-substitute.conf"
FOLDER = "/etc/tie/substitute/status_probe"


@pytest.fixture(scope="module")
def node(bare_machine):
    with running(bare_machine):
        yield bare_machine


def members(machine) -> dict[str, list[int]]:
    """The processes of the container by what they are."""
    found: dict[str, list[int]] = {name: [] for name in PROGRAMS}
    for line in machine.run("ps", "-ww", "-u", "tie-runtime", "-o", "pid=,args=", check=False).stdout.splitlines():
        pid, arguments = line.split(None, 1)
        for name, pattern in PROGRAMS.items():
            if re.search(pattern, arguments):
                found[name].append(int(pid))
    return found


def instance(machine) -> str:
    """The runtime that the controller sees."""
    return status(machine).get("runtime", {}).get("instance_id", "")


def dies_and_returns(node, wait, kill) -> None:
    """`kill` is given the container's processes; all of them must go, and the node be back with a fresh runtime."""
    wait("a node", lambda: available(node), BACK_S)
    old, before = members(node), instance(node)
    assert [name for name, pids in old.items() if len(pids) != 1] == []
    run = node.show(UNIT, "InvocationID")
    kill({name: pid for name, (pid,) in old.items()})
    wait("another runtime", lambda: node.show(UNIT, "InvocationID") != run, BACK_S)
    alive = {pid for pids in members(node).values() for pid in pids}
    assert alive.isdisjoint(pid for pids in old.values() for pid in pids), "they die together"
    wait("the node to come back", lambda: available(node) and instance(node) not in ("", before), BACK_S)


@pytest.mark.parametrize("victim", [name for name in PROGRAMS if name != "stub"])
def test_a_death_in_the_container_is_the_containers(node, wait, victim):
    dies_and_returns(node, wait, lambda pids: node.run("kill", "-KILL", str(pids[victim])))


def test_a_probe_that_ends_well_ends_the_container(node, wait):
    dies_and_returns(node, wait, lambda pids: node.run("kill", "-TERM", str(pids["probe"])))


def test_a_killed_stub_is_recycled_away(node, wait):
    dies_and_returns(node, wait, lambda pids: node.run("kill", "-KILL", str(pids["stub"])))


@pytest.fixture
def substitute(node, wait):
    """Exchanges the runtime for one with the substitute; gives the node back as it was."""

    def kill() -> None:
        node.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", UNIT)

    def substituted(how: str) -> None:
        wait("a node", lambda: available(node), BACK_S)
        folder = node.path(FOLDER)
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "main.py").write_text(SUBSTITUTE)
        (folder / "how").write_text(how)
        drop_in = node.path(DROP_IN)
        drop_in.parent.mkdir(parents=True, exist_ok=True)
        drop_in.write_text(f"[Service]\nEnvironment=PYTHONPATH={folder_inside}\n")
        node.run("systemctl", "daemon-reload")
        kill()

    folder_inside = str(Path(FOLDER).parent)
    yield substituted
    node.run("rm", "-r", DROP_IN, folder_inside)
    node.run("systemctl", "daemon-reload")
    kill()
    wait("the node to come back", lambda: available(node), BACK_S)


def restarts(node) -> int:
    return int(node.show(UNIT, "NRestarts")["NRestarts"])


def test_a_probe_that_exits_with_an_error_ends_the_container(node, wait, substitute):
    substitute("no 1")
    wait("the container", lambda: all(len(members(node)[name]) == 1 for name in ("probe", "triton")), BACK_S)
    before, said, (probe,) = restarts(node), node.journal(UNIT).count("probe-died"), members(node)["probe"]
    wait("the substitute to listen to signals", lambda: caught(node, probe) & 1 << signal.SIGUSR1 - 1)
    node.run("kill", "-USR1", str(probe))
    wait("another runtime", lambda: restarts(node) > before, BACK_S)
    assert probe not in members(node)["probe"]
    wait("the reason", lambda: node.journal(UNIT).count("probe-died") > said)
    assert not available(node)


def test_a_probe_that_ends_before_anything_has_started_ends_the_container(node, wait, substitute):
    before = restarts(node)
    substitute("yes 1")
    wait("several tries", lambda: restarts(node) > before + 3, BACK_S)
    assert not available(node)


def caught(machine, pid: int) -> int:
    """Signals that a process has handlers for, as a bit mask."""
    text = machine.path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
