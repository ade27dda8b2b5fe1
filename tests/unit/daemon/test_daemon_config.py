"""node.toml: strict, ranged, and written so that it reads back the same."""

import msgspec
import pytest

from tie.daemon import config as node_config
from tie.daemon.errors import ConfigError


def load(tmp_path, text: str) -> node_config.NodeConfig:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return node_config.load(path)


def test_an_empty_file_is_the_default_node(tmp_path):
    assert load(tmp_path, "") == node_config.NodeConfig()


def test_values_are_read(tmp_path):
    config = load(tmp_path, 'run_dir = "/tmp/x"\n[app]\ntick_s = 0\nbuckets = [64, 2048]\n')
    assert config.app.tick_s == 0
    assert config.app.buckets == (64, 2048)
    assert config.sockets.kv.as_posix() == "/tmp/x/runtime/kv.sock"


@pytest.mark.parametrize(
    "text",
    [
        "typo = 1",
        "[app]\ntick = 1",
        "[app]\ntick_s = -1",
        "[app]\nmax_request_bytes = 0",
        '[app]\nmax_request_bytes = "1"',
        "[app]\nbuckets = []",
        "[app]\nbuckets = [16, 2048]",
        "[app]\nbuckets = [2048, 64]",
        "[app]\nbuckets = [64, 64, 2048]",
        "[app]\nbuckets = [64, 512]",
        "[app]\nbuckets = [64, 2097152]",
        "[store]\ncapacity_bytes = 1",
        '[gpuhealth]\nprovider = "none"',
        '[runtime]\nexecutor = "cuda"\ndtype = "f32"',
        '[runtime]\nexecutor = "native"\ntensor_parallel = 2',
        '[runtime]\nexecutor = "cuda"\npipeline_parallel = 2',
        "[runtime]\ntensor_parallel = 9\npipeline_parallel = 8",
        "[runtime]\ntensor_parallel = 0",
        "not toml at all",
        "\0",
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_file(tmp_path, text):
    with pytest.raises(ConfigError, match=r"node\.toml"):
        load(tmp_path, text)


def test_a_missing_file_and_bytes_that_are_no_text(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        node_config.load(tmp_path / "none.toml")
    (tmp_path / "node.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError):
        node_config.load(tmp_path / "node.toml")


def test_what_is_dumped_is_loaded_again(tmp_path):
    config = msgspec.structs.replace(
        node_config.NodeConfig(),
        node_id='quote" and \\ and ü\n',
        app=msgspec.structs.replace(node_config.AppConfig(), buckets=(64, 4096), tick_s=0.5),
    )
    path = tmp_path / "node.toml"
    path.write_bytes(node_config.dump(config))
    assert node_config.load(path) == config


def test_a_name_that_is_not_utf8_cannot_be_dumped():
    with pytest.raises(ConfigError, match="UTF-8"):
        node_config.dump(msgspec.structs.replace(node_config.NodeConfig(), run_dir="/run/\udcff"))


def test_every_socket_has_a_directory_of_its_own_edge():
    sockets = node_config.NodeConfig().sockets
    names = [name for name in dir(type(sockets)) if isinstance(getattr(type(sockets), name), property)]
    paths = [getattr(sockets, name) for name in names]
    assert len(set(paths)) == len(paths)
    assert all(path.is_relative_to("/run/tie") for path in paths)
