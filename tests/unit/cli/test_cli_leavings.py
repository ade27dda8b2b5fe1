"""What is left in the run directory of a `tie up` that has stopped."""

import os
import socket
from pathlib import Path

import pytest

from tie.cli import prepare, settings
from tie.cloudboard.keys import create_node_keys
from tie.daemon import socket_path
from tie.daemon.config import NodeConfig
from tie.daemon.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return NodeConfig(run_dir=str(tmp_path / "r"))


def live(config: NodeConfig) -> None:
    """Leaves what a node makes, and something of somebody else's."""
    prepare.write_configuration(config)
    sockets = config.sockets
    for path in (sockets.kps, sockets.control, sockets.engine):
        os.close(socket_path.claim(path))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    (sockets.engine.parent / "triton" / "models").mkdir(parents=True)
    (sockets.engine.parent / "triton" / "models" / "config.pbtxt").write_text("x")
    sockets.control.with_name("events.json").write_text("[]")
    Path(config.run_dir, "mine.lock").write_text("x")


def left(config: NodeConfig) -> set[str]:
    top = Path(config.run_dir)
    return {str(path.relative_to(top)) for path in top.rglob("*") if not path.is_dir()}


def test_no_key_socket_or_lock_outlives_a_node(config: NodeConfig) -> None:
    with prepare.prepared(Path(config.run_dir)):
        live(config)
        assert config.sockets.statement_key.exists()
    assert left(config) == {"node.toml", "control/events.json", "mine.lock"}
    assert {path.name for path in Path(config.run_dir).iterdir() if path.is_dir()} == {"control"}


def test_what_a_killed_node_left_goes_with_the_next_one(config: NodeConfig) -> None:
    Path(config.run_dir).mkdir()
    (Path(config.run_dir) / settings.UP_LOCK).write_text("4711")
    live(config)
    with prepare.prepared(Path(config.run_dir)):
        pass
    assert left(config) == {"node.toml", "control/events.json", "mine.lock"}


def test_keys_that_were_put_there_before_stay(config: NodeConfig) -> None:
    create_node_keys(config)
    key = config.sockets.statement_key.read_bytes()
    with prepare.prepared(Path(config.run_dir)):
        live(config)
    assert config.sockets.statement_key.read_bytes() == key


def test_a_node_that_is_refused_takes_nothing_from_the_one_that_runs(config: NodeConfig) -> None:
    with prepare.prepared(Path(config.run_dir)):
        live(config)
        before = left(config)
        with pytest.raises(ConfigError, match="already runs"), prepare.prepared(Path(config.run_dir)):
            raise AssertionError("unreachable")
        assert left(config) == before


def test_what_cannot_be_removed_is_named(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with prepare.prepared(Path(config.run_dir)):
        live(config)
        monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    assert f"{config.sockets.binding_key.parent} could not be removed" in capsys.readouterr().err
