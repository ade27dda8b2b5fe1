"""Nothing that a taken-over app tries works: tests/system/hostile_app.py has the list, this file what each must meet."""

import importlib.util
import json
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("hostile_app.py")
KILLED = "killed by the filter of system calls"
# What must stop an attempt where it is neither the filter nor one of the answers that mean "there is no such thing here
# for you".
_REFUSALS = {"EACCES", "EPERM", "EROFS", "ENOENT", "ENOTDIR", "ECONNREFUSED", "EAFNOSUPPORT"}
_OTHERWISE = {
    "a fork bomb": {"EAGAIN"}, "8 GiB of memory": {"MemoryError"}, "8 GiB of anonymous pages": {"ENOMEM"},
    "8 GiB in the store": {"ENOSPC"}, "remove the runtime's directory": {"EBUSY", "EROFS", "EACCES"},
    "pidfd_open": {KILLED}, "tgkill": {KILLED}, "a signal to init": {KILLED}, "a signal to everybody": {KILLED},
    "ptrace": {KILLED}, "process_vm_readv": {KILLED}, "memfd_create": {KILLED}, "memfd_secret": {KILLED},
    "bpf": {KILLED}, "io_uring": {KILLED}, "userfaultfd": {KILLED}, "perf_event_open": {KILLED}, "keyctl": {KILLED},
    "kernel log by syslog(2)": {KILLED}, "POSIX message queue": {KILLED}, "System V shared memory": {KILLED},
    "remount": {KILLED}, "a namespace": {KILLED}, "become root": {KILLED},
    "execute a program by descriptor": {KILLED}, "a new device": {KILLED},
}  # fmt: skip


def _attempts() -> list[str]:
    spec = importlib.util.spec_from_file_location("hostile_app", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.ATTEMPTS)


@pytest.fixture(scope="module")
def attempt(machine, in_the_apps_place):
    """Lets a hostile app attempt something; how it ended."""
    machine.run("systemctl", "start", "tie-cache-stored.service")  # an edge that an app really has
    with in_the_apps_place(machine, "hostile", PROGRAM.read_text()) as dialed:

        def attempted(word: str) -> str:
            (answer,) = json.loads(dialed(word).stdout)
            return json.loads(answer) if answer else KILLED

        attempted.dial = dialed
        yield attempted
    machine.run("systemctl", "stop", "tie-cache-stored.service")


@pytest.mark.parametrize("what", _attempts())
def test_a_hostile_app_is_refused(attempt, what):
    ended = attempt(what)
    assert ended in _OTHERWISE.get(what, _REFUSALS), ended


def test_a_killed_attempt_leaves_no_core_and_no_unit(machine, attempt, wait):
    def killed() -> int:
        return machine.journal("hostile@*").count(f"status={signal.SIGSYS.value}/SYS")

    before = killed()
    assert attempt("memfd_create") == KILLED
    wait("systemd to say what ended the instance", lambda: killed() == before + 1)
    wait("the instance to be forgotten", lambda: machine.instances("hostile@") == [])
    assert (
        machine.run("find", "/", "-xdev", "-newer", "/opt/tie/bin/hostile", "-name", "core*", "-size", "+4k").stdout
        == ""
    )


def test_a_fork_bomb_leaves_others_alone(machine, attempt, wait):
    assert attempt("a fork bomb") == "EAGAIN"
    assert attempt.dial("nothing", 3).returncode == 0, "others start and answer"
    wait("all that it started to be gone", lambda: machine.instances("hostile@") == [])
    users = machine.run("ps", "-eo", "user:32=").stdout.split()
    assert not [user for user in users if user.startswith("ta")]
