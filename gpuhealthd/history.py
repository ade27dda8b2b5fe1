"""What outlives the daemon, but not the machine's boot: XIDs and marks of each device, in a small file.

Restarting gpuhealthd must not heal a GPU; a reboot may. The file lies in the daemon's run directory and names the boot
(kernel documentation, admin-guide/sysctl/kernel: random/boot_id); one of another boot counts for nothing. It is
replaced as a whole, and a damaged one is set aside and said.
"""

import contextlib
import os
from pathlib import Path
from typing import Annotated, Final

import msgspec

from gpuhealthd.classify import History, Track
from gpuhealthd.snapshot import Label, Name
from tie.daemon import log

_MAX_BYTES: Final = 256 * 1024
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

Number = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Counts = Annotated[dict[Number, Count], msgspec.Meta(max_length=512)]
Marks = Annotated[dict[Name, float], msgspec.Meta(max_length=16)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A strictly decoded part of the file."""


class _Device(_Message, frozen=True):
    name: Label
    xids: Counts
    log_xids: Counts
    fatal: Annotated[list[Number], msgspec.Meta(max_length=512)]
    most: Marks
    least: Marks


class _File(_Message, frozen=True):
    boot: Annotated[str, msgspec.Meta(max_length=64)]
    log_position: Annotated[int, msgspec.Meta(ge=-1)]
    devices: Annotated[dict[Label, _Device], msgspec.Meta(max_length=128)]


_DECODER = msgspec.json.Decoder(_File)


def boot_id() -> str:
    """This boot's name; empty where the kernel does not tell, and then nothing is remembered."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


class Archive:
    """The file.

    Args:
        path: where it is.
        boot: this boot's name.
    """

    def __init__(self, path: Path, boot: str) -> None:
        self._path = path
        self._boot = boot
        self._written = b""

    def load(self) -> tuple[History, int]:
        """What is known of this boot, and the last record of the kernel's log that it covers (-1 for none)."""
        try:
            with self._path.open("rb") as file:
                payload = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return History(), -1
        except OSError as error:
            log.failure("history.unreadable", error)
            return History(), -1
        try:
            if len(payload) > _MAX_BYTES:
                raise msgspec.ValidationError("too large")
            stored = _DECODER.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.failure("history.damaged", error)
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_suffix(".damaged"))
            return History(), -1
        if not self._boot or stored.boot != self._boot:
            return History(), -1
        tracks = {
            key: Track(
                name=entry.name,
                xids=entry.xids,
                log_xids=entry.log_xids,
                fatal=frozenset(entry.fatal),
                most=entry.most,
                least=entry.least,
            )
            for key, entry in stored.devices.items()
        }
        return History(tracks), stored.log_position

    def save(self, history: History, log_position: int) -> None:
        """Writes the file where it would differ. A disk that takes nothing costs the memory, not the verdict."""
        devices = {
            key: _Device(
                track.name,
                dict(track.xids),
                dict(track.log_xids),
                sorted(track.fatal),
                dict(track.most),
                dict(track.least),
            )
            for key, track in history.devices.items()
        }
        payload = msgspec.json.encode(_File(self._boot, log_position, devices))
        if payload == self._written or not self._boot:
            return
        new = self._path.with_suffix(".new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(payload)
            new.replace(self._path)
        except OSError as error:
            log.failure("history.not-saved", error)
            return
        self._written = payload
