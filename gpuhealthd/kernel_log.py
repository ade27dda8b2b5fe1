"""XIDs in the kernel's log: /dev/kmsg (kernel documentation, ABI/testing/dev-kmsg), without ever waiting.

    prefix,sequence,timestamp,flags;NVRM: Xid (PCI:0000:41:00): 79, pid=..., GPU has fallen off the bus.

Records since boot are there when the daemon starts; a sequence number says which were taken into account before.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_RECORD = re.compile(rb"\d+,(?P<number>\d{1,18}),[^;]*;(?P<text>.*)")
_XID = re.compile(
    rb"NVRM: Xid \(PCI:([0-9A-Fa-f]{1,8}):([0-9A-Fa-f]{1,2}):([0-9A-Fa-f]{1,2})[^)]*\): (\d{1,5})(?:,(.*))?"
)
_READ: Final = 16 * 1024  # one record of the kernel is smaller
_MAX_READS: Final = 4096  # in one look


@dataclass(frozen=True, slots=True)
class Xid:
    """One XID.

    Attributes:
        pci: the GPU's address, "domain:bus:device" in hexadecimal without leading zeros.
        fatal: the line calls it fatal; only NVLink 5's say that or the opposite.
    """

    pci: str
    number: int
    fatal: bool = False


class KernelLog:
    """Reads what is new.

    Args:
        path: /dev/kmsg, or a file of the same lines.
        after: the sequence number of the last record that is not wanted any more; -1 for none.

    Attributes:
        position: of the last record read; None while the log cannot be read.
    """

    def __init__(self, path: Path, after: int) -> None:
        self.position: int | None = None
        self._after = after
        self._rest = b""
        try:
            self._file: int | None = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self._file = None
        else:
            self.position = after

    def read(self) -> Iterator[Xid]:
        """XIDs since the call before. Records that the kernel has overwritten meanwhile are lost."""
        for _ in range(_MAX_READS if self._file is not None else 0):
            try:
                data = os.read(self._file or 0, _READ)
            except BrokenPipeError:
                continue  # overwritten: the next read takes up with the oldest there is
            except (BlockingIOError, OSError):
                return
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[-_READ:]
            for line in lines:
                yield from self._take(line)

    def _take(self, line: bytes) -> Iterator[Xid]:
        record = _RECORD.match(line)
        if record is None:
            return  # a continuation line
        number = int(record["number"])
        if number <= self._after:
            return
        self._after = self.position = number
        found = _XID.search(record["text"])
        if found is not None:
            yield Xid(_address(found), int(found[4]), fatal=bool(re.search(rb"\bFatal\b", found[5] or b"")))


def _address(found: "re.Match[bytes]") -> str:
    return ":".join(f"{int(found[part], 16):x}" for part in (1, 2, 3))
