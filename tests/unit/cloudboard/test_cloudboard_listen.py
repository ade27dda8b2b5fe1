"""The listening socket, and how many connections the process can afford."""

import re
import resource
import socket
from pathlib import Path

import pytest

from tie.cloudboard.main import limits, listen
from tie.daemon.config import CloudBoardConfig
from tie.daemon.errors import ConfigError
from tie.http.server import affordable


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_peers_that_vanish_are_noticed_by_the_kernel(host: str) -> None:
    with listen(CloudBoardConfig(host=host, port=0)) as listening:
        address = listening.getsockname()
        with socket.create_connection(address[:2]), listening.accept()[0] as accepted:
            # Inherited: half an hour and more of silence without acknowledgements is what the defaults allow.
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_an_address_that_is_taken() -> None:
    with listen(CloudBoardConfig(port=0)) as listening, pytest.raises(ConfigError, match="in use"):
        listen(CloudBoardConfig(port=listening.getsockname()[1]))


@pytest.mark.parametrize("host", ["\udcff", "\0", "ü" * 80, "a..b"])
def test_a_name_that_no_host_can_have(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(CloudBoardConfig(host=host, port=0))


def test_connections_leave_descriptors_for_the_rest() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        assert affordable(100, 10) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
        most = affordable(10**9, 300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
        assert most < before[1] - 300
        chosen = limits(CloudBoardConfig(max_connections=200, max_connections_per_peer=50, max_in_flight=7))
        assert (chosen.connections, chosen.connections_per_peer, chosen.streams) == (200, 50, 7)
        assert limits(CloudBoardConfig()).connections_per_peer == 0  # or one peer's would never make room for its own
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_unit_allows_as_many_descriptors_as_the_defaults_need() -> None:
    unit = (Path(__file__).parents[3] / "systemd" / "tie-cloudboard.service").read_text()
    (allowed,) = re.findall(r"(?m)^LimitNOFILE=(\d+)$", unit)
    config = CloudBoardConfig()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if before[1] < int(allowed):
            pytest.skip("this machine allows fewer open files than the unit")
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(allowed), before[1]))
        assert limits(config).connections == config.max_connections
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == int(allowed), "it had to ask for more"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
