"""What a daemon remembers across its own restarts, but not across the machine's boot: one small JSON file.

The file lies in the daemon's run directory and names the boot that wrote it (kernel documentation,
admin-guide/sysctl/kernel: random/boot_id). That makes times of the monotonic clock in it comparable, and lets a reboot
heal what it heals. It is replaced as a whole; one of another boot counts for nothing, a damaged one is set aside.
"""

import contextlib
import os
from pathlib import Path
from typing import Annotated, Final, Generic, TypeVar

import msgspec

from tie.daemon import log

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Remembered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is remembered; a daemon's own adds its fields, with bounds, for whoever can write the file is not believed.

    Attributes:
        boot: set by `StateFile.save`.
    """

    boot: Annotated[str, msgspec.Meta(max_length=64)] = ""


Kept = TypeVar("Kept", bound=Remembered)


def boot_id() -> str:
    """This boot's name; empty where the kernel does not tell, and then nothing is remembered."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


class StateFile(Generic[Kept]):
    """The file.

    Args:
        path: where it is.
        kind: of what is remembered.
        max_bytes: of a file that is read.
        boot: this boot's name; the kernel's unless given.
    """

    def __init__(self, path: Path, kind: type[Kept], *, max_bytes: int, boot: str | None = None) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._max_bytes = max_bytes
        self._boot = boot_id() if boot is None else boot
        self._written = b""

    def load(self) -> Kept | None:
        """What was remembered in this boot, if anything."""
        try:
            with self._path.open("rb") as file:
                payload = file.read(self._max_bytes + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.failure("state.unreadable", error)
            return None
        try:
            if len(payload) > self._max_bytes:
                raise msgspec.ValidationError("too large")
            state = self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.failure("state.damaged", error)
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_suffix(".damaged"))
            return None
        return state if self._boot and state.boot == self._boot else None

    def save(self, state: Kept) -> bool:
        """Writes the file where it would differ. A disk that takes nothing costs the memory, nothing else.

        Returns:
            Whether the file now says so.
        """
        payload = msgspec.json.encode(msgspec.structs.replace(state, boot=self._boot))
        if payload == self._written or not self._boot:
            return bool(self._boot)
        new = self._path.with_suffix(".new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(payload)
            new.replace(self._path)
        except OSError as error:
            log.failure("state.not-saved", error)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            return False
        self._written = payload
        return True
