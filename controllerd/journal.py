"""What happened to the node and why: the last few hundred happenings, for `tie events`.

Kept in a small file beside the controller's socket, so that a controller that is started again remembers
(`tie.daemon.state_file`), and so that `tie events` has something to read when no controller answers.

What happens again while the node's state stays the same, such as a runtime that ends at every start, is one entry that
counts: a flood does not wash the night away. Where the run directory's disk takes nothing more, an empty file beside
the journal, which needs no room, marks that it has a gap.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec

from controllerd.happening import Happening
from controllerd.states import State
from tie.daemon.state_file import Remembered, StateFile
from tie.proto import control_pb2 as pb

KEPT: Final = 256
NAME: Final = "events.json"
MAX_WORD: Final = 200
_MAX_BYTES: Final = 1024 * 1024
_MAX_CODES: Final = 12
_RECURRING: Final = frozenset({"runtime", "peer", "gpu", "settling", "keys"})

Code = Annotated[str, msgspec.Meta(max_length=64)]
Id = Annotated[str, msgspec.Meta(max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One happening, or the last of several that are alike.

    Attributes:
        at: on the controller's clock, seconds since boot.
        wall: the time of day, seconds since 1970.
        times: how often it happened.
        first_wall: the time of day when it happened first.
    """

    at: float
    wall: float
    kind: Code
    code: Code
    before: Id = ""
    after: Id = ""
    more: Annotated[tuple[Code, ...], msgspec.Meta(max_length=_MAX_CODES)] = ()
    word: Annotated[str, msgspec.Meta(max_length=MAX_WORD)] = ""
    count: Count = 0
    seconds: float = 0.0
    times: Count = 1
    first_wall: float = 0.0

    def repeats(self, other: "Entry") -> bool:
        """Whether it tells the same as `other`, of another moment. Which runtime it was makes no difference."""
        same = (self.kind, self.code, self.more) == (other.kind, other.code, other.more)
        return same and (self.kind == "runtime" or self.after == other.after)


class _Entries(Remembered, frozen=True):
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=KEPT)]
    recycles: Annotated[dict[Code, Count], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=dict)


class Journal:
    """The happenings, oldest first.

    Args:
        path: of the file.
        clock: the controller's.
        boot: this boot's name; the kernel's unless given.

    Attributes:
        entries: they.
        recycles: begun in this boot, by reason.
        gap: some that came before were not kept.
    """

    def __init__(self, path: Path, clock: Callable[[], float], boot: str | None = None) -> None:
        self._file = StateFile(path, _Entries, max_bytes=_MAX_BYTES, boot=boot)
        self._mark = path.with_suffix(".gap.json")
        self._clock = clock
        stored, now = self._file.load(), clock()
        # What would lie ahead was not written by this boot's controller, whatever it says of itself.
        past = (entry for entry in stored.entries if 0 <= entry.at <= now) if stored else ()
        self.entries: deque[Entry] = deque(past, maxlen=KEPT)
        self.recycles: dict[str, int] = dict(stored.recycles) if stored and self.entries else {}
        self.gap = bool(self.entries) and self._mark.exists()

    def add(self, happening: Happening) -> None:
        """Adds one, now."""
        wall = time.time()
        entry = Entry(
            self._clock(),
            wall,
            happening.kind,
            happening.code,
            happening.before,
            happening.after,
            happening.more[:_MAX_CODES],
            happening.word[:MAX_WORD],
            happening.count,
            happening.seconds,
            first_wall=wall,
        )
        if entry.kind == "recycle":
            self.recycles[entry.code] = self.recycles.get(entry.code, 0) + 1
        self.entries.append(self._joined(entry))
        self._save()

    def transitions(self) -> list[Entry]:
        """Those that are changes of the node's state."""
        names = {state.name.lower() for state in State}  # what the file says of itself is not believed
        return [entry for entry in self.entries if entry.kind == "state" and {entry.before, entry.after} <= names]

    def _joined(self, entry: Entry) -> Entry:
        """The entry; together with one like it since the state changed last, which it then replaces."""
        if entry.kind not in _RECURRING:
            return entry
        for earlier in reversed(self.entries):
            if earlier.kind not in _RECURRING:
                break
            if entry.repeats(earlier):
                self.entries.remove(earlier)
                return msgspec.structs.replace(entry, times=earlier.times + 1, first_wall=earlier.first_wall)
        return entry

    def _save(self) -> None:
        saved = self._file.save(_Entries(tuple(self.entries), dict(self.recycles)))
        with contextlib.suppress(OSError):  # a directory that takes not even a name
            if saved:
                self._mark.unlink(missing_ok=True)
            else:
                self._mark.touch()


def messages(entries: Iterable[Entry], now: float) -> pb.Happenings:
    """Entries as they are told to operators."""
    return pb.Happenings(
        happenings=[
            pb.Happening(
                age_s=now - entry.at,
                wall_s=entry.wall,
                kind=entry.kind,
                code=entry.code,
                before=entry.before,
                after=entry.after,
                more=entry.more,
                word=entry.word,
                count=entry.count,
                seconds=entry.seconds,
                times=entry.times,
                first_wall_s=entry.first_wall,
            )
            for entry in entries
        ]
    )
