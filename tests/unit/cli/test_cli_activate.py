"""`tie assets activate` where something goes wrong: which bundle is active, who is in service, what is told."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from tie.assets import active
from tie.assets.bundle import open_bundle
from tie.assets.sample import make_sample_bundle
from tie.cli import activate, control, settings
from tie.daemon.errors import PeerDiedError, PeerError, RefusedError
from tie.proto import control_pb2


class Node:
    """A controller that keeps in mind what it is asked."""

    def __init__(self, *, maintenance: bool = False) -> None:
        self.maintenance = maintenance
        self.refuses = False
        self.ends = False

    async def GetStatus(self, request, timeout):  # noqa: N802 (generated name)
        del request, timeout
        return control_pb2.NodeStatus(maintenance=self.maintenance)

    async def SetMaintenance(self, request, timeout):  # noqa: N802 (generated name)
        del timeout
        if not request.on and self.refuses:
            raise PeerDiedError("nobody answers")
        self.maintenance = request.on

    async def Watch(self, request, timeout):  # noqa: N802 (generated name)
        del request, timeout
        if self.ends:
            raise PeerDiedError("the controller ended")
        yield control_pb2.NodeStatus(state=control_pb2.STATE_MAINTENANCE)

    async def Recycle(self, request, timeout):  # noqa: N802 (generated name)
        del request, timeout
        yield control_pb2.RecycleProgress(finished=True, error="fresh-runtime-deadline")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundles")
    return [make_sample_bundle(directory / name, seed=seed).directory for seed, name in enumerate("ab")]


@pytest.fixture
def link(bundles, tmp_path, monkeypatch):
    """As an installation makes it: relative."""
    made = bundles[0].parent / f"{tmp_path.name}-{active.LINK}"
    made.symlink_to(bundles[0].name)
    monkeypatch.setattr(settings, "load_running", lambda _: SimpleNamespace(model=SimpleNamespace(bundle=str(made))))
    return made


def connect(monkeypatch, node: Node) -> None:
    @asynccontextmanager
    async def connected(run_dir):
        yield SimpleNamespace(node=node)

    monkeypatch.setattr(control, "connected", connected)


def test_a_bundle_that_the_node_does_not_come_up_with_gives_way_to_the_old_one(bundles, link, tmp_path, monkeypatch):
    node = Node()
    connect(monkeypatch, node)
    with pytest.raises(RefusedError, match="fresh-runtime-deadline"):
        activate.activate_bundle(tmp_path, bundles[1])
    assert open_bundle(link).directory == bundles[0].resolve()
    assert node.maintenance, "it stays withdrawn"


@pytest.mark.parametrize("resting", [False, True])
def test_a_drain_that_fails_leaves_the_node_as_it_was(bundles, link, tmp_path, monkeypatch, resting):
    node = Node(maintenance=resting)
    node.ends = True
    connect(monkeypatch, node)
    with pytest.raises(PeerError, match="the controller ended"):
        activate.activate_bundle(tmp_path, bundles[1])
    assert node.maintenance is resting


def test_what_went_wrong_first_is_what_is_told(bundles, link, tmp_path, monkeypatch, capsys):
    node = Node()
    node.ends = node.refuses = True
    connect(monkeypatch, node)
    with pytest.raises(PeerError, match="the controller ended"):
        activate.activate_bundle(tmp_path, bundles[1])
    assert "tie maintenance off" in capsys.readouterr().err


def test_an_interrupted_drain_leaves_the_node_in_service(bundles, link, tmp_path, monkeypatch):
    node = Node()

    async def interrupted(request, timeout):
        raise asyncio.CancelledError
        yield

    monkeypatch.setattr(node, "Watch", interrupted)
    connect(monkeypatch, node)
    with pytest.raises(asyncio.CancelledError):
        activate.activate_bundle(tmp_path, bundles[1])
    assert not node.maintenance
    assert link.readlink().name == bundles[0].name
