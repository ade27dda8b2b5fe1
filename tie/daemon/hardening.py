"""What every process of the suite does to itself before it touches anything: no core, not dumpable.

A piped `kernel.core_pattern` ignores RLIMIT_CORE (core(5)), hence both.
"""

import ctypes
import os
import resource

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


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


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
