"""What outlives the daemon, but not the machine's boot: XIDs and marks of each device (`tie.daemon.state_file`).

Restarting gpuhealthd must not heal a GPU; a reboot may.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec

from gpuhealthd.classify import History, Track
from gpuhealthd.snapshot import Label, Name
from tie.daemon.state_file import Remembered, StateFile

_MAX_BYTES: Final = 256 * 1024

Number = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Counts = Annotated[dict[Number, Count], msgspec.Meta(max_length=512)]
Marks = Annotated[dict[Name, float], msgspec.Meta(max_length=16)]


class _Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Label
    xids: Counts
    log_xids: Counts
    fatal: Annotated[list[Number], msgspec.Meta(max_length=512)]
    most: Marks
    least: Marks


class _Known(Remembered, frozen=True):
    log_position: Annotated[int, msgspec.Meta(ge=-1)]
    devices: Annotated[dict[Label, _Device], msgspec.Meta(max_length=128)]


class Archive:
    """The file.

    Args:
        path: where it is.
        boot: this boot's name; the kernel's unless given.
    """

    def __init__(self, path: Path, boot: str | None = None) -> None:
        self._file = StateFile(path, _Known, max_bytes=_MAX_BYTES, boot=boot)

    def load(self) -> tuple[History, int]:
        """What is known of this boot, and the last record of the kernel's log that it covers (-1 for none)."""
        stored = self._file.load()
        if stored is None:
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
        """Writes the file where it would differ."""
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
        self._file.save(_Known(log_position, devices))
