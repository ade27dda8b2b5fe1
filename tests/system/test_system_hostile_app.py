"""Nothing that a taken-over app tries works: hostile_app.py has the list, this file what each attempt must meet."""

import importlib.util
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("hostile_app.py")
KILLED = "killed by the filter of system calls"
NOT_RUN = "the loader ended with 127"  # it runs, and may map nothing as code that is no library
# What must stop an attempt where it is neither the filter nor one of the answers that mean "there is no such thing here
# for you".
_REFUSALS = {"EACCES", "EPERM", "EROFS", "ENOENT", "ENOTDIR", "ECONNREFUSED", "EAFNOSUPPORT"}
_OTHERWISE = {
    "a fork bomb": {"EAGAIN"}, "8 GiB of memory": {"MemoryError"}, "8 GiB of anonymous pages": {"ENOMEM"},
    "8 GiB in the store": {"ENOSPC"}, "remove the runtime's directory": {KILLED}, "a raised limit": {"ValueError"},
    "execute by way of the loader": {NOT_RUN},
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
def attempt(machine, in_the_apps_place, wait):
    """Lets a hostile app attempt something; how it ended."""
    machine.run("systemctl", "start", "tie-cache-stored.service")  # an edge that an app really has
    with in_the_apps_place(machine, "hostile", "#!/opt/tie/bin/python\n" + PROGRAM.read_text()) as dialed:

        def ends(how: str) -> int:
            return machine.journal("hostile@*").count(how)

        def attempted(word: str) -> str:
            sure = {"status=31/SYS": KILLED, "status=127/n/a": NOT_RUN}
            before = {how: ends(how) for how in sure}
            (answer,) = json.loads(dialed(word).stdout)
            if answer:
                return json.loads(answer)
            ended: list[str] = []

            def said() -> bool:
                ended[:] = [sure[how] for how in sure if ends(how) > before[how]]
                return bool(ended)

            wait("systemd to say what ended it", said, 10.0)
            return ended[0]

        attempted.dial = dialed
        yield attempted
    machine.run("systemctl", "stop", "tie-cache-stored.service")


@pytest.mark.parametrize("what", _attempts())
def test_a_hostile_app_is_refused(attempt, what):
    ended = attempt(what)
    assert ended in _OTHERWISE.get(what, _REFUSALS), ended


def test_a_killed_attempt_leaves_no_core_and_no_unit(machine, attempt, wait):
    assert attempt("memfd_create") == KILLED
    wait("the instance to be forgotten", lambda: machine.instances("hostile@") == [])
    newer = ("-newer", "/opt/tie/bin/hostile", "-name", "core*", "-size", "+4k")
    assert machine.run("find", "/", "-xdev", *newer).stdout == ""


def test_a_fork_bomb_leaves_others_alone(machine, attempt, wait):
    assert attempt("a fork bomb") == "EAGAIN"
    assert json.loads(attempt.dial("nothing", 3).stdout) == ['"here"'] * 3, "others start and answer"
    wait("all that it started to be gone", lambda: machine.instances("hostile@") == [])
    users = machine.run("ps", "-eo", "user:32=").stdout.split()
    assert not [user for user in users if user.startswith("ta")]
