"""sysusers and tmpfiles make the accounts, and one directory with one group for each edge."""

from pathlib import Path

import pytest

from tie.daemon.config import NodeConfig
from tie.daemon.sockets import Sockets

pytestmark = pytest.mark.system

SOCKETS = NodeConfig().sockets
EDGES = sorted(
    {getattr(SOCKETS, name).parent for name, value in vars(Sockets).items() if isinstance(value, property)},
)
USERS = (
    "tie-keys",
    "tie-kps",
    "tie-cloudboard",
    "tie-owner",
    "tie-runtime",
    "tie-gpuhealth",
    "tie-controller",
    "tie-store",
)


@pytest.mark.parametrize("user", USERS)
def test_each_daemon_has_an_account_that_nobody_can_log_in_to(machine, user):
    fields = machine.run("getent", "passwd", user).stdout.strip().split(":")
    assert int(fields[2]) < 1000
    assert fields[6].endswith("nologin")


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name)
def test_each_edge_has_its_directory(machine, edge: Path):
    mode, owner, group = machine.run("stat", "-c", "%a %U %G", str(edge)).stdout.split()
    assert mode == ("2751" if edge.name == "keys" else "2750")
    assert group == f"tie-edge-{edge.name}"
    assert owner == "root" or owner in USERS
    members = machine.run("getent", "group", group).stdout.strip().split(":")[3]
    assert members == "", "only operators are ever members: units bring their groups with them"


def test_nothing_else_is_below_the_run_directory(machine):
    found = set(machine.run("ls", "/run/tie").stdout.split())
    assert found == {edge.name for edge in EDGES} | {"assets", "root", "node.toml"}
    assert machine.run("stat", "-c", "%a %U", "/run/tie/root").stdout.split() == ["555", "root"]
