"""What `tie proxy` refuses before it listens."""

import socket

import pytest

from tie.cli.proxy import proxy
from tie.daemon.errors import ConfigError


@pytest.fixture
def start(tmp_path):
    """Starts it, for a node that nobody asks."""
    (tmp_path / "statement.pub").write_bytes(bytes(32))
    known = ["--url", "http://127.0.0.1:1", "--statement-key", str(tmp_path / "statement.pub"), "--model", "m"]
    return lambda *arguments: proxy.main([*known, *arguments], standalone_mode=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_only_programs_on_this_machine_may_ask_without_a_key(start, host) -> None:
    with pytest.raises(ConfigError, match="not this machine's own") as refused:
        start("--host", host)
    assert "--api-key-file" in refused.value.hint


@pytest.mark.parametrize("key", ["", "short", "two words of sixteen", "schlüssel-schlüssel"])
def test_a_key_that_is_none(start, tmp_path, key) -> None:
    (tmp_path / "key").write_text(key)
    with pytest.raises(ConfigError, match="16 characters") as refused:
        start("--api-key-file", str(tmp_path / "key"))
    assert not key or key not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot read the API key"):
        start("--api-key-file", str(tmp_path / "other"))


def test_a_port_that_is_taken(start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="in use") as refused:
        start("--port", str(other.getsockname()[1]))
    assert "--port" in refused.value.hint
