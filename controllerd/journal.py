"""What happened to the node and why: the last few hundred happenings, for `tie events`.

Kept in a small file beside the controller's socket, so that a controller that is started again remembers
(`tie.daemon.state_file`).
"""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec

from controllerd.mind import Happening
from controllerd.states import State
from tie.daemon.state_file import Remembered, StateFile

KEPT: Final = 256
_MAX_BYTES: Final = 512 * 1024
_MAX_CODES: Final = 12

Code = Annotated[str, msgspec.Meta(max_length=64)]
Id = Annotated[str, msgspec.Meta(max_length=128)]


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
    before: Id = ""
    after: Id = ""
    more: Annotated[tuple[Code, ...], msgspec.Meta(max_length=_MAX_CODES)] = ()


class _Entries(Remembered, frozen=True):
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=KEPT)]


class Journal:
    """The happenings, oldest first.

    Args:
        path: of the file.
        clock: the controller's.
        boot: this boot's name; the kernel's unless given.
    """

    def __init__(self, path: Path, clock: Callable[[], float], boot: str | None = None) -> None:
        self._file = StateFile(path, _Entries, max_bytes=_MAX_BYTES, boot=boot)
        self._clock = clock
        stored, now = self._file.load(), clock()
        # What would lie ahead was not written by this boot's controller, whatever it says of itself.
        past = (entry for entry in stored.entries if 0 <= entry.at <= now) if stored else ()
        self.entries: deque[Entry] = deque(past, maxlen=KEPT)

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
        self._file.save(_Entries(tuple(self.entries)))

    def transitions(self) -> list[Entry]:
        """Those that are changes of the node's state."""
        names = {state.name.lower() for state in State}  # what the file says of itself is not believed
        return [entry for entry in self.entries if entry.kind == "state" and {entry.before, entry.after} <= names]
