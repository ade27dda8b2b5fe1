"""What a process that sits in tie-cloud-app@'s place can see and do.

The unit is the real one but for its ExecStart=, which starts a prober: it takes one word on its connection, reports
or attempts what the word says, and stays until the other side closes.
"""

import json
import os
import signal

import pytest

pytestmark = pytest.mark.system

_PROBER = r"""#!/opt/tie/bin/python
import ctypes, json, os, socket, sys

connection = socket.socket(fileno=3)

def attempt(call):
    try:
        call()
    except (OSError, MemoryError) as error:
        return type(error).__name__ + " " + (os.strerror(error.errno) if isinstance(error, OSError) else "")
    return "done"

def write(folder):
    with open(folder + "/left-behind", "wb") as file:
        file.write(b"x")

# What only marks where another unit, with the same root, mounts something is empty and nobody's.
def holds(folder):
    return os.stat(folder).st_mode & 0o2000 or folder.endswith("/assets") or os.listdir(folder)

def has_content(path):
    return os.listdir(path) if os.path.isdir(path) else os.path.getsize(path)

def see():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {
        "pid": os.getpid(), "uid": os.getuid(), "unit": os.environ["USER"],
        "pids": [name for name in os.listdir("/proc") if name.isdigit()],
        "interfaces": [line.split(":")[0].strip() for line in open("/proc/self/net/dev") if ":" in line],
        "etc": [name for name in os.listdir("/etc") if has_content("/etc/" + name)],
        "edges": [name for name in os.listdir("/run/tie") if holds("/run/tie/" + name)],
        "home": attempt(lambda: os.listdir("/root")),
        "capabilities": status["CapBnd"].strip() + status["CapEff"].strip(),
        "no_new_privileges": status["NoNewPrivs"].strip(),
        "libc": next(line for line in open("/proc/self/maps") if "libc.so" in line).split("-")[0],
        "core_filter": int(open("/proc/self/coredump_filter").read(), 16),
        "writes": {folder: attempt(lambda: write(folder)) for folder in
                   ("/", "/tmp", "/var/tmp", "/dev/shm", "/dev", "/run", "/run/tie/runtime", "/usr", "/opt/tie")},
        "tcp": attempt(lambda: socket.socket(socket.AF_INET)),
        "netlink": attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
        "memory": attempt(lambda: bytearray(400 << 20)),
        "files": attempt(lambda: [open("/etc/tie/node.toml") for _ in range(300)]),
    }

word = connection.recv(64).decode()
if word == "see":
    answer = json.dumps(see())
elif word == "signal":
    answer = attempt(lambda: os.kill(1, 0))
elif word == "memfd":
    answer = attempt(lambda: os.memfd_create("x"))
elif word == "ptrace":
    answer = attempt(lambda: ctypes.CDLL(None).ptrace(0, 0, 0, 0))
connection.sendall(answer.encode())
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
"""


@pytest.fixture(scope="module")
def dial(machine, in_the_apps_place):
    """Talks to probers in tie-cloud-app@'s place: the answers to `word` of `count` that live at the same time."""
    with in_the_apps_place(machine, "prober", _PROBER) as dialed:
        yield dialed


@pytest.fixture(scope="module")
def seen(dial) -> list[dict]:
    """What three instances that live at the same time see."""
    return [json.loads(answer) for answer in json.loads(dial("see", 3).stdout)]


def test_each_connection_has_a_process_with_a_uid_and_an_address_space_of_its_own(seen):
    for what in ("pid", "uid", "unit", "libc"):
        assert len({view[what] for view in seen}) == len(seen), what
    assert all(61184 <= view["uid"] <= 65519 for view in seen), "the range of dynamic users"


def test_an_instance_sees_itself_only(seen):
    for view in seen:
        assert view["pids"] == [str(view["pid"])]
        assert view["interfaces"] == ["lo"]
        assert set(view["etc"]) <= {"tie", "ld.so.cache"}
        assert set(view["edges"]) == {"runtime", "assets", "store"}
        assert view["home"] == "PermissionError Permission denied"


def test_an_instance_can_leave_nothing_behind(seen):
    for view in seen:
        for folder, outcome in view["writes"].items():
            assert outcome == "OSError Read-only file system", folder


def test_an_instance_has_no_power(seen):
    for view in seen:
        assert int(view["capabilities"], 16) == 0
        assert view["no_new_privileges"] == "1"
        assert view["core_filter"] == 0
        assert view["tcp"] == "OSError Address family not supported by protocol"
        assert view["netlink"] == "OSError Address family not supported by protocol"


def test_the_limits_hold_without_the_help_of_cgroups(seen):
    for view in seen:
        assert view["memory"].startswith("MemoryError")
        assert view["files"] == "OSError Too many open files"


@pytest.mark.parametrize("word", ["signal", "memfd", "ptrace"])
def test_a_forbidden_system_call_ends_the_instance(machine, dial, wait, word):
    def killed() -> int:
        return machine.journal("prober@*").count(f"status={signal.SIGSYS.value}/SYS")

    before = killed()
    assert json.loads(dial(word).stdout) == [""], "no answer: it did not get that far"
    wait("systemd to say what ended the instance", lambda: killed() == before + 1)


def test_only_the_edges_group_may_connect(dial):
    refused = dial("see", groups="tie-edge-probe", check=False)
    assert refused.returncode != 0
    assert "PermissionError" in refused.stderr


def test_instances_are_gone_when_their_connection_is(machine, dial, wait):
    dial("see", 2)
    wait("instances to end", lambda: machine.instances("prober@") == [])


def test_a_burst_beyond_the_default_limits_is_served(machine, dial):
    # The defaults take 64 connections and close the socket for good after 200 starts in 2 s.
    answers = json.loads(dial("see", 100).stdout)
    assert len({json.loads(answer)["uid"] for answer in answers}) == 100
    assert machine.show("prober.socket", "ActiveState") == {"ActiveState": "active"}


_COUNT_THE_DEAD = r"""
import glob, json, os, socket, sys, time
path, count = sys.argv[1], int(sys.argv[2])
took = []
for _ in range(count):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(path)
    connection.sendall(b"see")
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    view = json.loads(answer)
    group = glob.glob(f"/sys/fs/cgroup/**/prober@*-{os.getpid()}-0.service", recursive=True)
    assert group, "its cgroup"
    private = glob.glob("/tmp/systemd-private-*prober@*") + glob.glob("/var/tmp/systemd-private-*prober@*")
    begun = time.monotonic()
    connection.close()
    while any(map(os.path.exists, [*group, *private])):
        assert time.monotonic() - begun < 10, (group, private)
        time.sleep(0.0005)
    took.append(time.monotonic() - begun)
took.sort()
print(json.dumps([1000 * took[int(share * (count - 1))] for share in (0.5, 0.99, 1.0)]))
"""


@pytest.mark.timeout(700)  # a thousand
def test_nothing_of_an_instance_outlives_it(machine, dial):
    # Its processes go before its cgroup can, and systemd removes its private folders last.
    count = 1000 if os.environ.get("TIE_SLOW") == "1" else 20
    script = ("/opt/tie/bin/python", "-c", _COUNT_THE_DEAD, "/run/tie/app/prober.sock", str(count))
    figures = json.loads(machine.run(*script, timeout=600).stdout)
    print(f"gone after (ms; median, p99, longest of {count}): {', '.join(f'{figure:.1f}' for figure in figures)}")
    assert machine.instances("prober@") == []
