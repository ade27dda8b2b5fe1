"""What the store holds: entries by index, oldest write first out, within a capacity in bytes. Pure but for descriptors.

One resource is counted, bytes, and every entry costs at least its share of `max_entries`, so that many small ones are
no cheaper way to push others out than few large ones. How fast entries that are still good may be pushed out is limited
as well: when somebody floods the store it is the flood that is refused.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

PAGE: Final = 4096


class EntryTooLargeError(Exception):
    """Larger than an entry may be: no waiting will help."""


class StoreFullError(Exception):
    """There is no room that may be made now."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The store's bounds.

    Attributes:
        capacity: bytes of all entries, those being written included.
        max_entry: bytes of one.
        max_entries: how many there can be at most.
        ttl_s: the longest life of one.
        turnover_s: how long it takes at least to push out everything.
    """

    capacity: int
    max_entry: int
    max_entries: int
    ttl_s: float
    turnover_s: float


@dataclass(slots=True, eq=False)
class Entry:
    """One sealed entry, the same one for as long as it is filed. Its descriptor is the store's own.

    Attributes:
        size: exact bytes of the memfd.
        cost: what it counts as.
        expires: on the store's clock, seconds.
    """

    descriptor: int
    size: int
    cost: int
    expires: float


@dataclass(slots=True)
class Counters:
    """What has become of entries since the start."""

    filed: int = 0
    replaced: int = 0
    evicted: int = 0
    expired: int = 0
    dropped: int = 0


class Entries:
    """The table. Not thread-safe: the event loop owns it.

    Attributes:
        counters: for the operator.

    Args:
        limits: the bounds.
        clock: seconds, monotonic.
        close: closes the descriptor of an entry of a size.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float], close: Callable[[int, int], None]) -> None:
        self.counters = Counters()
        self._close = close
        self._limits = limits
        self._clock = clock
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # oldest write first
        self._used = 0
        self._reserved = 0
        # A bucket of bytes that may be pushed out now; it fills at capacity / turnover_s.
        self._budget = float(limits.max_entry)
        self._budget_at = clock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used(self) -> int:
        """Cost of the entries that are filed."""
        return self._used

    @property
    def reserved(self) -> int:
        """Cost of those that are being written."""
        return self._reserved

    def reserve(self, size: int, *, evicting: bool = True) -> int:
        """Makes room for an entry of `size` bytes; gives its cost, to be given back or filed.

        Without `evicting` only free room is taken: no entry that is still good makes any.

        Raises:
            EntryTooLargeError: one may not be so large.
            StoreFullError: what is there may not be pushed out now.
        """
        if not 0 < size <= self._limits.max_entry:
            raise EntryTooLargeError
        cost = max(-(-size // PAGE) * PAGE, self._limits.capacity // self._limits.max_entries)
        self.expire()
        needed = self._used + self._reserved + cost - self._limits.capacity
        if needed > 0:
            if not evicting:
                raise StoreFullError
            self._evict(needed)
        self._reserved += cost
        return cost

    def release(self, cost: int) -> None:
        """Gives back what `reserve` took."""
        self._reserved -= cost

    def file(self, index: bytes, entry: Entry) -> None:
        """Files an entry whose cost was reserved; it takes the place of one of the same index."""
        self._reserved -= entry.cost
        self._used += entry.cost
        former = self._remove(index)
        self.counters.filed += 1
        self.counters.replaced += former
        self._entries[index] = entry

    def expiry(self, ttl_s: float) -> float:
        """When an entry written now ends. `ttl_s` 0: as late as possible."""
        return self._clock() + min(ttl_s or self._limits.ttl_s, self._limits.ttl_s)

    def get(self, index: bytes) -> Entry | None:
        """The entry; None when it is not there, or not any more."""
        entry = self._entries.get(index)
        return entry if entry and entry.expires > self._clock() else None

    def drop(self, index: bytes) -> bool:
        """Lets go of an entry; false when there is none."""
        live = self.get(index) is not None
        self.counters.dropped += self._remove(index) and live
        return live

    def end(self, index: bytes, entry: Entry) -> None:
        """Lets go of this very entry, if it is still there."""
        if self._entries.get(index) is entry:
            self.counters.dropped += self._remove(index)

    def renew(self, index: bytes, ttl_s: float) -> bool:
        """Makes an entry as young as if it had been written now; false when there is none."""
        entry = self.get(index)
        if entry is None:
            return False
        entry.expires = self.expiry(ttl_s)
        self._entries.move_to_end(index)
        return True

    def expire(self) -> None:
        """Lets go of everything whose time has come."""
        now = self._clock()
        for index in [index for index, entry in self._entries.items() if entry.expires <= now]:
            self.counters.expired += self._remove(index)

    def clear(self) -> None:
        """Lets go of everything."""
        for index in list(self._entries):
            self._remove(index)

    def _evict(self, needed: int) -> None:
        """Pushes out the oldest writes until `needed` bytes are free; all of them or, where that may not be, none."""
        now = self._clock()
        rate = self._limits.capacity / self._limits.turnover_s
        self._budget = min(float(self._limits.max_entry), self._budget + (now - self._budget_at) * rate)
        self._budget_at = now
        victims = []
        freed = 0
        for index, entry in self._entries.items():
            if freed >= needed:
                break
            victims.append(index)
            freed += entry.cost
        if freed < needed or freed > self._budget:
            raise StoreFullError
        self._budget -= freed
        for index in victims:
            self.counters.evicted += self._remove(index)

    def _remove(self, index: bytes) -> bool:
        entry = self._entries.pop(index, None)
        if entry is None:
            return False
        self._used -= entry.cost
        self._close(entry.descriptor, entry.size)
        return True
