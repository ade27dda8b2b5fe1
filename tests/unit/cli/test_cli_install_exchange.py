"""Another version for a running node: what comes in which order, and who is in service when something goes wrong."""

import asyncio
import os
import shlex
import signal
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from controllerd.controller import Controller
from tie.assets.bundle import open_bundle
from tie.assets.sample import make_sample_bundle
from tie.cli import control, settings
from tie.cli.install import exchange, running
from tie.cli.install.exchange import Activate, Exchange, Restart
from tie.cli.install.machine import ASSETS, COMMAND, CONFIG, MAINTENANCE, PREFIX, TREES, Machine
from tie.cli.install.model import ACTIVE
from tie.cli.install.steps import Folder, Link, WriteFiles, carry_out
from tie.daemon.config import NodeConfig
from tie.daemon.errors import ConfigError, PeerDiedError, PeerError, PeerTimeoutError, RefusedError
from tie.proto import control_pb2

ROOT = Path(__file__).parents[3]
UNITS = ["tie.target", "tie-controllerd.service", "tie-cloud-app@.service", "tie.slice"]
OLD, NEW = TREES / "1/tree", TREES / "2/tree"


class Host(Machine):
    """A machine that notes what it is told to run, and which tree was in use."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        object.__setattr__(self, "ran", [])

    def run(self, *argv: str, stdin: str = "") -> str:
        del stdin
        link = self.at(PREFIX)
        self.ran.append((argv[:2], str(link.readlink()) if link.is_symlink() else ""))  # type: ignore[attr-defined]
        return ""

    def starts(self) -> list[str]:
        """The tree that was in use, at each start of the node."""
        return [tree for argv, tree in self.ran if argv == ("systemctl", "start")]  # type: ignore[attr-defined]


class Node:
    """A node's controller, as far as an exchange talks to it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.switched: list[bool] = []
        self.states = [control_pb2.STATE_DRAINING, control_pb2.STATE_MAINTENANCE, control_pb2.STATE_AVAILABLE]
        self.watched = 0
        self.recycled: list[str] = []
        self.error = ""

    async def GetStatus(self, request, timeout):  # noqa: N802 (generated name)
        del request, timeout
        return control_pb2.NodeStatus(maintenance=self.machine.at(MAINTENANCE).exists())

    async def Recycle(self, request, timeout):  # noqa: N802 (generated name)
        del request, timeout
        self.recycled.append(self.machine.at(ACTIVE).resolve().name)
        yield control_pb2.RecycleProgress(finished=True, error=self.error)

    async def SetMaintenance(self, request, timeout) -> None:  # noqa: N802 (generated name)
        del timeout
        self.switched.append(request.on)
        flag = self.machine.at(MAINTENANCE)
        if request.on:
            flag.touch()
        else:
            flag.unlink(missing_ok=True)

    async def Watch(self, request, timeout):  # noqa: N802 (generated name)
        del request, timeout
        self.watched += 1
        for state in self.states:
            yield control_pb2.NodeStatus(state=state)


@pytest.fixture
def host(tmp_path) -> Host:
    machine = Host(tmp_path)
    machine.at(MAINTENANCE).parent.mkdir(parents=True)
    machine.at(PREFIX).parent.mkdir(parents=True)
    machine.at(PREFIX).symlink_to(OLD)
    return machine


@pytest.fixture
def node(host, monkeypatch) -> Node:
    made = Node(host)

    @asynccontextmanager
    async def connected(run_dir):
        del run_dir
        yield SimpleNamespace(node=made)

    monkeypatch.setattr(control, "connected", connected)
    return made


def changes(machine: Machine) -> list:
    return [
        WriteFiles(machine, "files", {CONFIG: b"new"}),
        Folder(machine, "tree", TREES / "2", lambda folder: folder.mkdir()),
        Link(machine, "link", PREFIX, NEW),
    ]


def _quietly(text: str) -> None:
    del text


@pytest.mark.parametrize("restart", ["drained", "now"])
def test_what_is_laid_beside_comes_first_then_the_node_is_exchanged(host, node, restart):
    steps = running.arrange(host, changes(host), UNITS, restart=restart)
    assert [type(step) for step in steps] == [Folder, Exchange, WriteFiles, Link, Restart]
    carry_out(steps, _quietly)
    assert host.starts() == [str(NEW)]
    assert node.switched == ([True] if restart == "drained" else [])
    assert not host.at(MAINTENANCE).exists()


@pytest.mark.parametrize("restart", ["drained", "now"])
def test_when_the_new_version_does_not_come_up_the_old_one_is_started(host, node, restart, monkeypatch):
    async def in_vain(self) -> None:
        raise PeerTimeoutError("on purpose")

    monkeypatch.setattr(Exchange, "come_up", in_vain)
    said: list[str] = []
    with pytest.raises(PeerTimeoutError, match="on purpose"):
        carry_out(running.arrange(host, changes(host), UNITS, restart=restart), said.append)
    assert host.starts() == [str(NEW), str(OLD)]
    assert not host.at(MAINTENANCE).exists(), "in service, as before"
    says = Exchange(host, UNITS, drained=restart == "drained").says
    taken_back = [line for line in said if line.startswith("taking back")]
    assert taken_back[-2:] == [f"taking back: {says}", "taking back: tree"]


@pytest.mark.parametrize("restart", ["drained", "now"])
def test_a_node_that_an_operator_holds_out_of_service_stays_there(host, node, restart):
    host.at(MAINTENANCE).touch()
    node.states = node.states[:2]
    carry_out(running.arrange(host, changes(host), UNITS, restart=restart), _quietly)
    assert host.starts() == [str(NEW)]
    assert host.at(MAINTENANCE).exists()


@pytest.mark.parametrize("rested", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_drain_leaves_the_node_as_it_was(host, node, number, rested, monkeypatch):
    async def interrupted(request, timeout):
        os.kill(os.getpid(), number)
        async with asyncio.timeout(10):
            await asyncio.Event().wait()
        yield

    if rested:
        host.at(MAINTENANCE).touch()
    monkeypatch.setattr(node, "Watch", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            carry_out(running.arrange(host, changes(host), UNITS, restart="drained"), _quietly)
    finally:
        signal.signal(signal.SIGINT, before)
    assert host.starts() == [], "nothing was changed, so nothing is started"
    assert host.at(MAINTENANCE).exists() is rested


def test_a_drain_in_vain_is_what_is_told_even_if_the_node_cannot_be_put_in_service_again(host, node, monkeypatch):
    async def gone(request, timeout):
        raise PeerDiedError("the controller ended")
        yield

    async def only_on(request, timeout) -> None:
        if not request.on:
            raise PeerDiedError("nobody answers")

    monkeypatch.setattr(node, "Watch", gone)
    monkeypatch.setattr(node, "SetMaintenance", only_on)
    said: list[str] = []
    with pytest.raises(PeerError, match="the controller ended"):
        carry_out(running.arrange(host, changes(host), UNITS, restart="drained"), said.append)
    assert any("nobody answers" in line for line in said)


def test_coming_up_has_one_deadline_and_does_not_spin(host, node, monkeypatch):
    monkeypatch.setattr(exchange, "_START_S", 0.3)
    monkeypatch.setattr(exchange, "_AGAIN_S", 0.1)
    node.states = []  # reports end at once
    with pytest.raises(PeerTimeoutError):
        asyncio.run(Exchange(host, UNITS, drained=False).come_up())
    assert 1 <= node.watched <= 4


# ---- another model ---------------------------------------------------------------------------------------------------


@pytest.fixture
def models(host, monkeypatch) -> Host:
    """Two bundles on the machine, of which the node serves the first."""
    for seed, name in enumerate("ab"):
        make_sample_bundle(host.at(ASSETS / name), seed=seed)
    host.at(ACTIVE).symlink_to("a")
    serve(monkeypatch, host.at(ACTIVE))
    return host


def serve(monkeypatch, link: Path) -> None:
    """The running node's configuration names this link."""
    monkeypatch.setattr(settings, "load_running", lambda _: SimpleNamespace(model=SimpleNamespace(bundle=str(link))))


def another(machine: Machine) -> list:
    return [
        Folder(machine, "model", ASSETS / "c", lambda folder: folder.mkdir()),
        Link(machine, "served", ACTIVE, PurePosixPath("b")),
        Link(machine, "command", COMMAND, PREFIX / "bin/tie"),
    ]


def kinds(steps) -> list[type]:
    return [type(step) for step in steps]


def test_another_model_is_activated_at_the_end(host, monkeypatch):
    serve(monkeypatch, Path(ACTIVE))
    steps = running.arrange(host, another(host), UNITS, restart="drained")
    assert kinds(steps) == [Folder, Link, Activate]
    steps = running.arrange(host, [*another(host), *changes(host)], UNITS, restart="drained")
    assert kinds(steps) == [Folder, Folder, Exchange, Link, Link, WriteFiles, Link, Restart], "once is enough"
    steps = running.arrange(host, another(host), UNITS, restart="now")
    assert kinds(steps) == [Folder, Exchange, Link, Link, Restart], "the node is not waited for"


def test_a_running_node_never_gets_another_model_without_a_runtime(host, monkeypatch):
    serve(monkeypatch, Path(ACTIVE))
    with pytest.raises(ConfigError, match="runtime"):
        running.arrange(host, another(host), UNITS, restart="no")
    assert kinds(running.arrange(host, changes(host), UNITS, restart="no")) == kinds(changes(host))


def test_a_link_that_the_running_node_does_not_look_at_is_only_a_link(host, monkeypatch):
    serve(monkeypatch, Path("/srv/models/active"))
    assert kinds(running.arrange(host, another(host), UNITS, restart="drained")) == [Folder, Link, Link]
    assert kinds(running.arrange(host, another(host), UNITS, restart="no")) == [Folder, Link, Link]


def test_what_a_running_node_uses_is_mended_while_it_is_drained(host):
    host.at(TREES / "2").mkdir(parents=True)
    steps = running.arrange(host, changes(host)[1:2], UNITS, restart="drained")
    assert kinds(steps) == [Exchange, Folder, Restart]


def test_an_activation_exchanges_the_runtime_only(models, node):
    carry_out([Activate(models, UNITS, "served", ACTIVE, PurePosixPath("b"))], _quietly)
    assert open_bundle(models.at(ACTIVE)).directory == models.at(ASSETS / "b").resolve()
    assert node.recycled == ["b"]
    assert models.starts() == []
    assert not models.at(MAINTENANCE).exists()


@pytest.mark.parametrize("rested", [False, True])
def test_a_model_that_the_node_does_not_come_up_with_gives_way_to_the_old_one(models, node, rested):
    if rested:
        models.at(MAINTENANCE).touch()
    node.error = "fresh-runtime-deadline"
    with pytest.raises(RefusedError, match="fresh-runtime-deadline"):
        carry_out([Activate(models, UNITS, "served", ACTIVE, PurePosixPath("b"))], _quietly)
    assert open_bundle(models.at(ACTIVE)).directory == models.at(ASSETS / "a").resolve()
    assert len(models.starts()) == (0 if rested else 1)
    assert models.at(MAINTENANCE).exists() is rested, "as it was"


def test_a_model_is_taken_back_with_what_comes_after_it(models, node):
    broken = Link(models, "in the way", ACTIVE.parent / "a", PREFIX)  # a folder is there
    with pytest.raises(ConfigError):
        carry_out([Activate(models, UNITS, "served", ACTIVE, PurePosixPath("b")), broken], _quietly)
    assert open_bundle(models.at(ACTIVE)).directory == models.at(ASSETS / "a").resolve()
    assert len(models.starts()) == 1


def test_an_interrupted_activation_that_was_still_waiting_changes_nothing(models, node, monkeypatch):
    async def interrupted(request, timeout):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(node, "Watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carry_out([Activate(models, UNITS, "served", ACTIVE, PurePosixPath("b"))], _quietly)
    assert models.link(ACTIVE) == "a"
    assert models.starts() == []
    assert not models.at(MAINTENANCE).exists()


# ---- maintenance -----------------------------------------------------------------------------------------------------


def test_what_an_operator_wants_outlives_the_controller(tmp_path):
    config = NodeConfig()
    assert Controller(config)._flag == Path(MAINTENANCE)
    for name in (MAINTENANCE.name, "events.json", "control.sock.lock"):
        (tmp_path / name).touch()
    unit = (ROOT / "systemd/tie-controllerd.service").read_text()
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStopPost=")]
    words = shlex.split(line.partition("=")[2].replace(str(MAINTENANCE.parent), str(tmp_path)))
    subprocess.run(words, check=True, timeout=10)
    assert {path.name for path in tmp_path.iterdir()} == {MAINTENANCE.name, "events.json"}
