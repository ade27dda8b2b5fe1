"""Configuration as the command line builds it."""

import contextlib
import fcntl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.cli import prepare, settings
from tie.daemon import config as node_config
from tie.daemon.errors import ConfigError


def test_overrides_take_toml_values_and_plain_words() -> None:
    config = settings.effective(
        None,
        ["controller.recycle_interval_s=7.5", "runtime.dtype=f32", "node_id = 'a'", "app.buckets=[64, 1024]"],
        cloudboard__port=9000,
        run_dir=None,
    )
    assert config.controller.recycle_interval_s == 7.5
    assert config.runtime.dtype == "f32"
    assert config.node_id == "a"
    assert config.app.buckets == (64, 1024)
    assert config.cloudboard.port == 9000
    assert config.run_dir == "/run/tie"


@pytest.mark.parametrize(
    "override", ["nonsense", "x=1", "controller=1", "controller.x=1", "controller.recycle_interval_s.y=1", "=1"]
)
def test_a_wrong_name_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        settings.effective(None, [override])


@pytest.mark.parametrize("override", ["cloudboard.port=70000", "runtime.dtype=int3", "controller.heartbeat_s=-1"])
def test_a_wrong_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="configuration"):
        settings.effective(None, [override])


@pytest.mark.parametrize(
    "overrides",
    [["runtime.dtype=f32", "runtime.executor=cuda"], ["app.buckets=[64, 128]"], ["store.capacity_bytes=1"]],
)
def test_values_that_contradict_each_other_are_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=overrides[0].partition("=")[0].partition(".")[2]):
        settings.effective(None, overrides)


def test_what_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cloudboard\.port is given twice"):
        settings.effective(None, ["cloudboard.port=9000"], cloudboard__port=9001)
    assert settings.effective(None, ["cloudboard.port=9000"], cloudboard__port=None).cloudboard.port == 9000


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_is_a_setting_or_a_clear_refusal(name: str, value: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(settings.effective(None, [f"{name}={value}"]), node_config.NodeConfig)


def test_what_is_written_is_what_the_daemons_read(tmp_path: Path) -> None:
    config = settings.effective(None, ["controller.heartbeat_s=3"], run_dir=str(tmp_path))
    settings.node_toml(tmp_path).write_bytes(node_config.dump(config))
    assert settings.load_running(tmp_path) == config


def test_no_node_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no node runs"):
        settings.load_running(tmp_path)


def test_the_run_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIE_RUN_DIR", "/somewhere")
    assert settings.default_run_dir() == Path("/somewhere")


def test_who_holds_a_run_directory_is_told_by_its_lock(tmp_path: Path) -> None:
    assert settings.running_up(tmp_path) is None
    (tmp_path / settings.UP_LOCK).write_text("4711")
    assert settings.running_up(tmp_path) is None  # a former one, that ended
    with (tmp_path / settings.UP_LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert settings.running_up(tmp_path) == 4711


def test_an_installed_node_is_found_by_its_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "node.toml.installed"
    config = settings.effective(None, [], run_dir=str(tmp_path / "run"))
    installed.write_bytes(node_config.dump(config))
    monkeypatch.setattr(settings, "_INSTALLED", installed)
    assert settings.load_running(tmp_path / "run") == config
    with pytest.raises(ConfigError):
        settings.load_running(tmp_path / "elsewhere")


def test_a_run_directory_is_taken_from_where_it_was_chosen(tmp_path):
    chosen, silent = tmp_path / "chosen.toml", tmp_path / "silent.toml"
    chosen.write_text('run_dir = "/elsewhere"\n')
    silent.write_text('node_id = "a"\n')

    def run_dir(base: Path | None, *overrides: str, named: str | None = None) -> str:
        return settings.effective(base, overrides, run_dir_unless_named=Path("/mine"), run_dir=named).run_dir

    assert (
        run_dir(chosen) == run_dir(None, "run_dir=/elsewhere") == run_dir(silent, "run_dir=/elsewhere") == "/elsewhere"
    )
    assert run_dir(silent) == run_dir(None, "node_id=a") == "/mine"
    assert run_dir(chosen, named="/here") == run_dir(None, named="/here") == "/here"
    with pytest.raises(ConfigError, match="run_dir is given twice"):
        run_dir(None, "run_dir=/elsewhere", named="/here")
    assert settings.effective(silent, ()).run_dir == node_config.NodeConfig().run_dir


def test_a_folder_that_two_make_at_once_keeps_the_lock_of_the_one_that_has_it(tmp_path, monkeypatch):
    directory = tmp_path / "run"
    with prepare.prepared(directory):
        monkeypatch.setattr(prepare, "_missing", lambda _: [directory])  # as it was just before
        with pytest.raises(ConfigError, match="already runs"), prepare.prepared(directory):
            pass
        assert (directory / settings.UP_LOCK).exists()
        assert settings.running_up(directory)


def test_a_refused_node_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="refused"), prepare.prepared(tmp_path / "deep" / "run"):
        raise ConfigError("refused")
    assert list(tmp_path.iterdir()) == []
