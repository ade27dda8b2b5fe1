"""Sees what is around the node and tells it: peers that come and go, the key service, the disk, the controller itself.

Nothing here decides anything; what decides is in `mind`.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from controllerd.clock import Wakefulness
from controllerd.happening import Happening
from controllerd.journal import Journal
from controllerd.mind import Mind
from tie.proto import gpuhealth_pb2

LEAST_FREE: Final = 1024 * 1024  # bytes; daemons of the node write sockets, locks and small state files
_DISK_LOOK_S: Final = 2.0
_ENDED: Final = {
    ("controller", "stopped"),
    ("controller", "socket-gone"),
}  # last words of a controller that did not die
_STARTING: Final = ("probe-starting",)  # gpuhealthd's word for not having looked yet


class Seen(Protocol):
    """A peer, as it is seen here."""

    @property
    def lost(self) -> str:
        """How it was lost last: "gone", "silent", "garbled"; or empty."""

    @property
    def connected(self) -> bool:
        """Whether it can be reached and makes sense."""


class Judge(Protocol):
    """The hardware's."""

    message: gpuhealth_pb2.NodeVerdict | None

    @property
    def connected(self) -> bool:
        """Whether it can be reached and makes sense."""


class Witness:
    """Looks a few times a second.

    Args:
        tell: hears of what happens.
        clock: the controller's.
        wake: tells when the controller itself stood still.
        run_dir: on the disk to watch.

    Attributes:
        disk_full: the run directory's disk has next to nothing left.
    """

    def __init__(
        self, tell: Callable[[Happening], None], clock: Callable[[], float], wake: Wakefulness, run_dir: Path
    ) -> None:
        self.disk_full = False
        self._tell = tell
        self._clock = clock
        self._wake = wake
        self._run_dir = run_dir
        self._disk_due = 0.0
        self._known: dict[str, bool] = {}  # which peers were connected at the last look
        self._gpu_said: tuple[str, ...] | None = None
        self._keys = ""
        self._key_id = ""
        self._store_began: str | None = None

    def begin(self, journal: Journal, mind: Mind) -> None:
        """The controller begins, for the first time in this boot or once more; what it counted is counted on."""
        self._wake.take()
        before = journal.entries[-1] if journal.entries else None
        if journal.gap:
            self._tell(Happening("journal", "gap"))
        died = before is not None and (before.kind, before.code) not in _ENDED
        self._tell(Happening("controller", "began-anew" if died else "began"))
        mind.recycles.update(journal.recycles)

    def end(self, *, reachable: bool) -> None:
        """The controller has been asked to end, or asks itself because its socket has lost its file."""
        self._tell(Happening("controller", "stopped" if reachable else "socket-gone"))

    def look(
        self,
        peers: Mapping[str, Seen],
        gpu: Judge,
        store_began: str | None,
        keys: tuple[str, str],
        *,
        moving: bool,
    ) -> None:
        """Tells what has changed since the last look.

        Args:
            peers: by name.
            gpu: gpuhealthd.
            store_began: since when the cache store has held entries; None while it does not answer.
            keys: what CloudBoard says of its key service: "answers", "silent", or nothing; and the key in use.
            moving: a recycle is under way, so that the runtime's container is to end.
        """
        still_s = self._wake.take()
        if still_s:
            self._tell(Happening("controller", "stood-still", seconds=still_s))
        for name, peer in peers.items():
            if self._known.setdefault(name, False) != peer.connected:
                self._known[name] = peer.connected
                lost = "left" if moving and name == "probe" else peer.lost or "gone"
                self._tell(Happening("peer", "connected" if peer.connected else lost, after=name))
        if store_began is not None and store_began != self._store_began:
            if self._store_began is not None:
                self._tell(Happening("peer", "anew", after="store"))
            self._store_began = store_began
        self._look_at_gpu(gpu)
        self._look_at_keys(*keys)
        self._look_at_disk()

    def _look_at_gpu(self, gpu: Judge) -> None:
        said = tuple(gpu.message.reasons) if gpu.message is not None and gpu.connected else None
        if said is not None and said not in {self._gpu_said, _STARTING}:
            if said or self._gpu_said:
                self._tell(Happening("gpu", said[0] if said else "healthy", more=said))
            self._gpu_said = said

    def _look_at_keys(self, keys: str, key_id: str) -> None:
        if keys and keys != self._keys:
            if "silent" in {keys, self._keys}:
                self._tell(Happening("keys", keys))
            self._keys = keys
        if key_id != self._key_id:
            if self._key_id:
                self._tell(Happening("keys", "new-key"))
            self._key_id = key_id

    def _look_at_disk(self) -> None:
        if self._clock() < self._disk_due:
            return
        self._disk_due = self._clock() + _DISK_LOOK_S
        try:
            disk = os.statvfs(self._run_dir)
        except OSError:
            return
        full = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < LEAST_FREE
        if full != self.disk_full:
            self.disk_full = full
            self._tell(Happening("disk", "full" if full else "room"))
