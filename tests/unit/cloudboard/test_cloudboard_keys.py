"""Key files: made once, with their modes, whole or not at all."""

import stat
from pathlib import Path

import pytest

from tie.cloudboard import keys
from tie.daemon.config import NodeConfig
from tie.daemon.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return NodeConfig(run_dir=str(tmp_path))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_makes_both_pairs_and_keeps_them(config: NodeConfig) -> None:
    keys.create_node_keys(config)
    binding, signer = config.sockets.binding_key, config.sockets.statement_key
    assert [mode(path) for path in (binding, signer)] == [0o600, 0o600]
    assert [mode(keys.public_path(path)) for path in (binding, signer)] == [0o644, 0o644]
    before = {path.name: path.read_bytes() for path in binding.parent.iterdir()}
    assert sorted(before) == ["binding.key", "binding.pub", "statement.key", "statement.pub"]
    keys.create_node_keys(config)
    assert {path.name: path.read_bytes() for path in binding.parent.iterdir()} == before


def test_halves_belong_together(config: NodeConfig) -> None:
    keys.create_node_keys(config)
    assert keys.read_binding_key(config).public.raw == keys.read_binding_public(config).raw
    public = keys.read_statement_key(config).public_key().public_bytes_raw()
    assert public == keys.read_statement_public(config)


def test_a_missing_public_half_is_made_again(config: NodeConfig) -> None:
    keys.create_node_keys(config)
    public = keys.public_path(config.sockets.statement_key)
    before = public.read_bytes()
    public.unlink()
    keys.create_node_keys(config)
    assert public.read_bytes() == before


@pytest.mark.parametrize("name", ["binding.key", "statement.key"])
@pytest.mark.parametrize("content", [b"", b"short"])
def test_a_damaged_key_is_an_error_with_a_hint(config: NodeConfig, name: str, content: bytes) -> None:
    keys.create_node_keys(config)
    (config.sockets.binding_key.parent / name).write_bytes(content)
    with pytest.raises(ConfigError, match="is not a") as error:
        keys.create_node_keys(config)
    assert "new key" in error.value.hint


def test_a_missing_key_is_an_error(config: NodeConfig) -> None:
    for read in (
        keys.read_binding_key,
        keys.read_binding_public,
        keys.read_statement_key,
        keys.read_statement_public,
    ):
        with pytest.raises(ConfigError, match="cannot read"):
            read(config)
