"""A network of a process's own: loopback, which works, and nothing else; whoever the process is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WAIT_S = 30
PROGRAM = """
import json, os, socket, sys
from pathlib import Path
from tie.daemon.hardening import own_network

with_it = own_network()
names = [line.split(":")[0].strip() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
heard = b""
if with_it:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5) as client:
        accepted, _ = server.accept()
        accepted.send(b"x")
        heard = client.recv(1)
        accepted.close()
found = {"own": with_it, "names": names, "heard": heard.decode(), "uid": os.getuid(), "gid": os.getgid()}
print(json.dumps(found | {"network": os.readlink("/proc/self/ns/net")}))
"""


@pytest.mark.parametrize("user", [None, 65534])
def test_loopback_and_nothing_else(user):
    if user and os.geteuid():
        pytest.skip("only root can become somebody else")
    command = [sys.executable, "-P", "-c", PROGRAM]
    if user:
        # Its modules may lie where only root can read: the paths are opened before.
        become = f"import encodings.idna, json, os, socket, tie.daemon.hardening; os.setgid({user}); os.setuid({user})"
        become += "; tie.daemon.hardening._prctl(4, 1)"  # as a process is that was started by that user
        command[-1] = f"{become}\n{PROGRAM}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    found = json.loads(done.stdout)
    if not found["own"]:  # this kernel lets nobody have user namespaces
        assert user or os.geteuid()
        return
    assert (found["names"][0], found["heard"]) == ("lo", "x")
    assert not any(name.startswith(("eth", "en", "wl")) for name in found["names"])
    assert found["uid"] == (user or os.getuid())
    assert found["network"] != str(Path("/proc/self/ns/net").readlink())
