"""What happened to the node and why: the last few hundred happenings, for `tie events`.

Kept in a small file beside the controller's socket, so that a controller that is started again remembers. The file is
replaced as a whole; one that cannot be read, or was written in another boot, counts for nothing.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec

from controllerd.mind import Happening
from controllerd.states import State
from tie.daemon import log

KEPT: Final = 256
_MAX_BYTES: Final = 512 * 1024
_MAX_CODES: Final = 12

Code = Annotated[str, msgspec.Meta(max_length=64)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One happening.

    Attributes:
        at: on the controller's clock, seconds since boot.
        wall: the time of day, seconds since 1970.
    """

    at: float
    wall: float
    kind: Code
    code: Code
    before: Code = ""
    after: Code = ""
    more: Annotated[tuple[Code, ...], msgspec.Meta(max_length=_MAX_CODES)] = ()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=KEPT)]


_DECODER = msgspec.json.Decoder(_File)


class Journal:
    """The happenings, oldest first.

    Args:
        path: of the file.
        clock: the controller's.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self.entries: deque[Entry] = deque(_load(path, clock()), maxlen=KEPT)

    def add(self, happening: Happening) -> None:
        """Adds one, now."""
        entry = Entry(
            self._clock(),
            time.time(),
            happening.kind,
            happening.code,
            happening.before,
            happening.after,
            happening.more[:_MAX_CODES],
        )
        self.entries.append(entry)
        self._save()

    def transitions(self) -> list[Entry]:
        """Those that are changes of the node's state."""
        names = {state.name.lower() for state in State}  # what the file says of itself is not believed
        return [entry for entry in self.entries if entry.kind == "state" and {entry.before, entry.after} <= names]

    def _save(self) -> None:
        new = self._path.with_suffix(".new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(_File(tuple(self.entries))))
            new.replace(self._path)
        except OSError as error:  # a full disk costs the memory of it, nothing else
            log.failure("journal.not-saved", error)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)


def _load(path: Path, now: float) -> tuple[Entry, ...]:
    try:
        with path.open("rb") as file:
            payload = file.read(_MAX_BYTES)
        entries = _DECODER.decode(payload).entries
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.failure("journal.unreadable", error)
        return ()
    # The clock begins anew with each boot: an entry of the future is one of another boot.
    return entries if all(0 <= entry.at <= now for entry in entries) else ()
