"""What every process of the suite does to itself before it touches anything: no core, not dumpable; and more, for some.

A piped `kernel.core_pattern` ignores RLIMIT_CORE (core(5)), hence both.
"""

import ctypes
import fcntl
import os
import resource
import socket
import struct
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWUSER = 0x10000000  # linux/sched.h
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
_IFF_UP = 1
_IFREQ = struct.Struct("16sH22x")


def protect_process() -> None:
    """No core file and no ptrace by the same user, for the life of this process.

    `TIE_DUMPABLE=1` leaves the process open to debuggers and to its own user's /proc readers; the tests that look for
    remanence use it. It is never set by a unit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.environ.get("TIE_DUMPABLE") != "1":
        _prctl(_PR_SET_DUMPABLE, 0)


def die_with_parent(signal_number: int) -> None:
    """Asks the kernel for `signal_number` when the parent process ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends, so that none gets out of sight."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def own_network() -> bool:
    """Gives this process, and those that it starts, a network with nothing in it but loopback (network_namespaces(7)).

    Not for a process with several threads. Without the right to do so, it is done in a user namespace, where this
    process stays the user that it is.

    Returns:
        Whether it has such a network now; where the kernel does not give one, that is so if it had one already.

    Raises:
        OSError: the kernel gave one, and not what goes with it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNET) != 0:
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            # The first line is a heading: there is no way to anywhere, as under systemd's PrivateNetwork=.
            return len(Path("/proc/self/net/route").read_text().splitlines()) <= 1
        # Until they are mapped this process is nobody.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        _, flags = _IFREQ.unpack(fcntl.ioctl(asking, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0)))
        fcntl.ioctl(asking, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))
    return True


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
