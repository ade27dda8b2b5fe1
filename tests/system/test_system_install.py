"""A node's life under real systemd: `tie install`, start, use from outside, recycle, deaths, stop, `tie uninstall`.

Each test stands on its own (fixtures bring the machine to where it begins), and in this order none has to wait twice.
"""

import json
import os
import secrets
import threading
import time
from pathlib import Path

import pytest

from installed_node import BACK_S, CONTAINERS, INSTALLED, MODEL, START_S, TIE, available, status

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.skipif(os.environ.get("TIE_SLOW") != "1", reason="takes a minute: TIE_SLOW=1")
# What systemd and the base system keep there for themselves.
_NOT_OURS = (
    r"^/(run/(systemd|log|udev|lock|dbus|user|credentials|host|motd.*|utmp|tie/root)|etc/(passwd|group|g?shadow)-"
    r"|etc/\.pwd\.lock|var/lib/(systemd|apt|dpkg))(/|$)"
)
_FILES = f"""
find /etc /opt /usr/local /var/lib /var/tmp /run /tmp /dev/shm -xdev ! -path '{ROOT}*' -printf '%p %y %m %u %g %l\\n' \\
  | grep -Ev '{_NOT_OURS}' | sed -E 's/(systemd-private-[0-9a-f]+-.*service)-[^/ ]+/\\1/' | sort
"""
_UNITS = """
systemctl list-units --all --plain --no-legend | awk '{print $1, $3}' \\
  | grep -E '^(tie|cb_|gpuh)' | grep -v -e slice -e tie-test || true
"""
_ACCOUNTS = "getent passwd | cut -d: -f1; getent group | cut -d: -f1"
_SOCKETS = "ss -xlHn | awk '{print $5}' | grep -v systemd; ss -tlHn | awk '{print $4}'"


def listed(machine, what: str) -> set[str]:
    """The lines that a command prints inside."""
    return set(machine.run("sh", "-c", what).stdout.splitlines())


def state(machine) -> dict[str, set[str]]:
    """Everything by which a machine would show that a node is, or was, there."""
    return {
        "files": listed(machine, _FILES),
        "accounts": listed(machine, _ACCOUNTS),
        "units": listed(machine, _UNITS),
        "processes": processes(machine),
        "sockets": listed(machine, _SOCKETS),
    }


def processes(machine) -> set[str]:
    """The accounts that processes of a node belong to, and their programs."""
    lines = listed(machine, "ps -eo user:32=,args=")
    return {line for line in lines if line.startswith(("tie-", "ta", "tj"))}


def try_to_ask(machine, prompt: str = "The capital of France is", tokens: int = 8):
    """Asks with a program that runs outside of the container."""
    key = machine.path("/run/tie/keys/statement.pub")
    return machine.from_outside(
        TIE, "chat", "--url", "http://127.0.0.1:8443", "--statement-key", str(key), "--model", MODEL, "--json",
        "--max-tokens", str(tokens), "--temperature", "0", prompt,
    )  # fmt: skip


def ask(machine) -> dict:
    """One answer, asked for as a user would: who is told that the node is busy, or reaches nobody, asks again."""
    deadline = time.monotonic() + BACK_S
    while True:
        done = try_to_ask(machine)
        if done.returncode == 0:
            return json.loads(done.stdout)
        assert done.returncode in (69, 75), done.stderr
        assert time.monotonic() < deadline, done.stderr
        print(f"asks again: {done.stderr.strip()}")
        time.sleep(0.5)


@pytest.fixture(scope="module")
def before(bare_machine) -> dict[str, set[str]]:
    """The machine before anything of ours was on it."""
    return state(bare_machine)


@pytest.fixture
def installed(bare_machine, before):
    """The machine with a node on it."""
    bare_machine.run(TIE, "install", "--demo", *CONTAINERS, timeout=300)
    return bare_machine


@pytest.fixture
def node(installed, wait):
    """The machine with a node that is available."""
    installed.run("systemctl", "start", "tie.target", timeout=START_S)
    try:
        wait("the node to be available", lambda: available(installed), START_S)
    except AssertionError:
        print(installed.run("journalctl", "--no-pager", "-o", "cat", "-n", "80").stdout)
        raise
    return installed


def test_a_dry_run_says_what_an_installation_would_do_and_does_nothing(bare_machine, before):
    said = bare_machine.run(TIE, "install", "--dry-run", "--demo", timeout=120).stdout
    for word in ("/opt/tie", "accounts", "/usr/local/lib", "/etc/tie/node.toml", "/var/lib/tie/assets/demo", "keys"):
        assert word in said
    assert state(bare_machine) == before


def test_a_second_installation_finds_nothing_to_do(installed):
    there = state(installed)
    assert "nothing to do" in installed.run(TIE, "install", "--demo", timeout=120).stdout
    # The installed command can do it as well: it carries all that it was made from.
    assert "nothing to do" in installed.run(INSTALLED, "install", timeout=120).stdout
    assert state(installed) == there
    assert doctor(installed)["installation"]["level"] == "ok", "nothing was written into trees and roots"


def test_what_an_operator_edits_stays(installed):
    path = installed.path("/etc/tie/node.toml")
    shipped = path.read_text()
    path.write_text(shipped + "\n[controller]\nheartbeat_s = 1.0\n")
    try:
        assert "nothing to do" in installed.run(TIE, "install", timeout=120).stdout
        assert "heartbeat_s" in path.read_text()
    finally:
        path.write_text(shipped)


def doctor(machine) -> dict[str, dict]:
    """What `tie doctor` says, by name."""
    done = machine.run(INSTALLED, "doctor", "--json", check=False, timeout=120)
    return {result["name"]: result for result in json.loads(done.stdout)}


def test_doctor_sees_what_is_damaged(installed):
    found = doctor(installed)
    good = ("installation", "units", "accounts", "configuration", "model", "keys", "volatile storage")
    assert {found[name]["level"] for name in good} == {"ok"}
    module = next(installed.path("/opt/tie-trees").rglob("tie/__init__.py"))
    content = module.read_bytes()
    module.write_bytes(content + b"# changed\n")
    try:
        found = doctor(installed)["installation"]
        assert (found["level"], "tie install" in found["hint"]) == ("missing", True)
    finally:
        module.write_bytes(content)
    assert doctor(installed)["installation"]["level"] == "ok"


def test_an_installed_node_answers_from_outside(node):
    answer = ask(node)
    assert answer["text"].strip()
    assert node.show("tie-afm-runtime.service", "NRestarts") == {"NRestarts": "0"}, "nothing has had to be mended yet"
    assert answer["completion_tokens"] > 0


def test_a_recycle_brings_a_fresh_runtime_and_keeps_the_weights(node, wait):
    def main_pid(unit: str) -> str:
        return node.show(unit, "MainPID")["MainPID"]

    runtime, owner = main_pid("tie-afm-runtime.service"), main_pid("tie-model-owner.service")
    text = ask(node)["text"]
    node.run(INSTALLED, "recycle", timeout=BACK_S)
    assert main_pid("tie-afm-runtime.service") not in ("0", runtime)
    assert main_pid("tie-model-owner.service") == owner
    wait("the node to be available", lambda: available(node), BACK_S)
    assert ask(node)["text"] == text


@pytest.mark.parametrize("unit", ["tie-afm-runtime.service", "tie-model-owner.service", "tie-cloudboard.service"])
def test_a_death_is_mended(node, wait, unit):
    pid = node.show(unit, "MainPID")["MainPID"]
    node.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", unit)

    def back() -> bool:
        return node.show(unit, "MainPID")["MainPID"] not in ("0", pid) and available(node)

    wait(f"the node to come back after the death of {unit}", back, BACK_S)
    wait(
        "an answer: what CloudBoard knows of the node is a moment old", lambda: try_to_ask(node).returncode == 0, BACK_S
    )


def test_a_node_that_is_held_out_of_service_stays_there_when_its_controller_dies(node, wait):
    def at_rest() -> bool:
        return status(node).get("state") == "maintenance"

    node.run(INSTALLED, "maintenance", "on")
    wait("the node to be at rest", at_rest, BACK_S)
    pid = node.show("tie-controllerd.service", "MainPID")["MainPID"]
    node.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", "tie-controllerd.service")
    wait("another controller", lambda: node.show("tie-controllerd.service", "MainPID")["MainPID"] not in ("0", pid))
    wait("the node to be at rest", at_rest, BACK_S)
    assert try_to_ask(node).returncode == 75
    node.run(INSTALLED, "maintenance", "off")
    wait("the node to be available", lambda: available(node), BACK_S)


def test_another_model_for_a_running_node_exchanges_its_runtime_only(node):
    def pids() -> list[str]:
        units = ("tie-cloudboard", "tie-controllerd", "tie-model-owner", "tie-afm-runtime")
        return [node.show(f"{unit}.service", "MainPID")["MainPID"] for unit in units]

    def serves() -> str:
        return json.loads(node.run(INSTALLED, "assets", "show", "--json", "/var/lib/tie/assets/active").stdout)[
            "release"
        ]

    demo, before = serves(), pids()
    node.run(TIE, "assets", "create", "/var/lib/tie/assets/demo", "/tmp/other", "--release", "other", timeout=120)
    try:
        refused = node.run(TIE, "install", "--bundle", "/tmp/other", "--restart=no", check=False, timeout=120)
        assert (refused.returncode, serves()) == (78, demo), refused.stderr
        node.run(TIE, "install", "--bundle", "/tmp/other", timeout=300)
        assert serves() == "other"
        assert [old == new for old, new in zip(before, pids(), strict=True)] == [True, True, True, False]
        assert ask(node)["text"].strip()
        node.run(TIE, "install", "--demo", timeout=300)
        assert serves() == demo
        assert ask(node)["text"].strip()
        assert "nothing to do" in node.run(TIE, "install", "--demo", timeout=120).stdout
    finally:
        node.run("rm", "-r", "/tmp/other")


@SLOW
def test_another_version_loses_no_request_of_four_clients(node):
    key = node.path("/run/tie/keys/statement.pub")
    before = node.path("/opt/tie").readlink()
    stop = threading.Event()
    ends: list[int] = []

    def client() -> None:
        while not stop.is_set():
            ends.append(try_to_ask(node).returncode)

    clients = [threading.Thread(target=client) for _ in range(4)]
    for each in clients:
        each.start()
    try:
        done = node.run(TIE, "install", "--container=none", timeout=400)
    finally:
        stop.set()
        for each in clients:
            each.join()
    assert "out of service" in done.stdout
    assert node.path("/opt/tie").readlink() != before
    assert key.exists()
    assert set(ends) <= {0, 69, 75}, "answered, busy, or not reached at all: never cut off"
    assert ends.count(0) > 8
    print(f"answered {ends.count(0)}, busy {ends.count(75)}, not reached {ends.count(69)}")
    assert ask(node)["text"]


def traces(machine, secret: str) -> tuple[set[str], set[str], set[str]]:
    """Cores that are newer than the marker; files that hold the secret, and lines of the journal that do."""
    machine.run("journalctl", "--sync", check=False)
    changed = "find / /run /tmp /dev/shm /var/tmp -xdev -newer /run/marker -type f"
    return (
        listed(machine, f"{changed} -name 'core*' -size +4k"),
        listed(machine, f"{changed} ! -path '*/log/journal/*' -print0 | xargs -0 -r grep -la {secret}; true"),
        listed(machine, f"journalctl --no-pager | grep -a {secret}; true"),
    )


@SLOW
@pytest.mark.parametrize("unit", ["tie-cloud-app@*.service", "tie-afm-runtime.service", "tie-model-owner.service"])
def test_a_crash_leaves_no_core_and_nothing_of_a_prompt(node, wait, unit):
    secret = f"hippogriff{secrets.token_hex(8)}"
    node.run("touch", "/run/marker")
    # What is looked for would be found.
    node.run("sh", "-c", f"echo {secret} >/run/core-planted; head -c 8192 /dev/zero >>/run/core-planted")
    node.run("systemd-cat", "echo", secret)
    wait("the search to find what is there", lambda: list(map(len, traces(node, secret))) == [1, 1, 1])
    node.run("rm", "/run/core-planted")
    secret = f"hippogriff{secrets.token_hex(8)}"
    asking = threading.Thread(target=try_to_ask, args=(node, f"Tell me a long story of {secret}.", 400))
    asking.start()
    wait("the request to run", lambda: status(node).get("in_flight", 0) > 0)
    # It fails where some are gone before it has come to them.
    node.run("systemctl", "kill", "--kill-who=all", "--signal=SEGV", unit, check=False)
    wait("systemd to say what ended it", lambda: "status=11/SEGV" in node.journal(unit))
    asking.join()
    wait("the node to come back", lambda: available(node), BACK_S)
    assert traces(node, secret) == (set(), set(), set())
    node.run("rm", "/run/marker")


def test_a_stop_leaves_nothing(installed, wait):
    installed.run("systemctl", "stop", "tie.target", timeout=120)
    wait("the node's processes to end", lambda: not processes(installed))
    there = state(installed)
    installed.run("systemctl", "start", "tie.target", timeout=START_S)
    wait("the node to be available", lambda: available(installed), START_S)
    ask(installed)
    assert processes(installed), "the listing sees a node's processes"
    assert state(installed)["sockets"] > there["sockets"]
    installed.run("systemctl", "stop", "tie.target", timeout=120)
    wait("the node's processes to end", lambda: not processes(installed))
    assert state(installed) == there
    assert doctor(installed)["installation"]["level"] == "ok", "nothing was written into trees and roots"


def test_an_uninstallation_leaves_nothing(installed, before, wait):
    installed.run(TIE, "uninstall", "--purge", timeout=180)
    wait("systemd to forget the units", lambda: listed(installed, _UNITS) == before["units"])
    assert state(installed) == before
    assert "nothing is installed" in installed.run(TIE, "uninstall", timeout=60).stdout
