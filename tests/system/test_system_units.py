"""Our daemons in their real units."""

import json

import pytest

from tie.daemon.config import DEFAULT_BUCKETS
from tie.proto import app_pb2, owner_pb2

pytestmark = pytest.mark.system

_READ_FRAMES = r"""
import json, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(30)
connection.connect(sys.argv[1])
stream = connection.makefile("rb")
frames = []
while prefix := stream.read(4):
    frames.append(stream.read(int.from_bytes(prefix, "big")).hex())
print(json.dumps(frames))
"""


def test_gpuhealthd_becomes_ready_and_comes_back_after_a_kill(machine, wait):
    machine.run("systemctl", "start", "gpuhealthd.service")
    first = machine.show("gpuhealthd.service", "ActiveState", "MainPID")
    assert first["ActiveState"] == "active", "Type=notify: systemctl start waits for READY"
    socket = machine.run("stat", "-c", "%a %U %G", "/run/tie/gpuhealth/gpuhealth.sock").stdout.split()
    assert socket == ["660", "tie-gpuhealth", "tie-edge-gpuhealth"]
    machine.run("systemctl", "kill", "--kill-who=main", "-s", "KILL", "gpuhealthd.service")

    def back() -> bool:
        now = machine.show("gpuhealthd.service", "ActiveState", "MainPID")
        return now["ActiveState"] == "active" and now["MainPID"] not in ("0", first["MainPID"])

    wait("gpuhealthd to come back", back)
    machine.run("systemctl", "stop", "gpuhealthd.service")


_ATTACH = r"""
import contextlib, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(30)
connection.connect(sys.argv[1])
with contextlib.suppress(BrokenPipeError):  # refused at once
    connection.sendall(bytes.fromhex(sys.argv[2]))
print(connection.recv(65536).hex())
"""


@pytest.mark.parametrize(("user", "allowed"), [("tie-runtime", True), ("tie-cloudboard", False)])
def test_the_owner_of_the_weights_serves_the_runtime_only(machine, user, allowed):
    machine.run("systemctl", "start", "tie-model-owner.service")
    request = owner_pb2.OwnerRequest(attach=owner_pb2.Attach(layout_id="torch-cpu-bf16", world_size=1))
    done = machine.run(
        "setpriv", f"--reuid={user}", f"--regid={user}", "--groups=tie-edge-owner", "--",
        "/opt/tie/bin/python", "-c", _ATTACH, "/run/tie/owner/owner.sock", request.SerializeToString().hex(),
    )  # fmt: skip
    reply = owner_pb2.OwnerReply.FromString(bytes.fromhex(done.stdout.strip()))
    # There is no bundle here, which only the runtime gets to hear: being in the edge's group is not enough.
    assert (reply.refused.reason == "not-allowed") is not allowed, machine.journal("tie-model-owner.service")


def test_the_app_answers_in_its_sandbox_that_there_is_no_runtime(machine, wait):
    machine.run("systemctl", "start", "tie-cloud-app.socket")
    read = machine.run(
        "setpriv", "--reuid=tie-cloudboard", "--regid=tie-cloudboard", "--groups=tie-edge-app", "--",
        "/opt/tie/bin/python", "-c", _READ_FRAMES, "/run/tie/app/app.sock",
    )  # fmt: skip
    frames = [bytes.fromhex(frame) for frame in json.loads(read.stdout)]
    assert frames, machine.journal("tie-cloud-app@*")
    assert all(len(frame) in DEFAULT_BUCKETS for frame in frames)
    assert app_pb2.AppOut.FromString(frames[-1]).WhichOneof("kind") == "done"
    wait("the instance to end", lambda: machine.instances("tie-cloud-app@") == [])


@pytest.mark.parametrize("unit", ["tie-cloud-app@x.service", "cb_jobhelper@x.service"])
def test_units_of_one_request_carry_the_cgroup_limits_too(machine, unit):
    shown = machine.show(unit, "MemoryMax", "MemorySwapMax", "TasksMax", "LimitCORE", "Slice", "RestrictNamespaces")
    assert shown == {
        "MemoryMax": str(320 * 1024 * 1024), "MemorySwapMax": "0", "TasksMax": "32", "LimitCORE": "0",
        "Slice": "tie-app.slice", "RestrictNamespaces": "yes",
    }  # fmt: skip
