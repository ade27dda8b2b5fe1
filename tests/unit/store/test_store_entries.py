"""The table: oldest first, within capacity, and no faster than it may."""

import contextlib
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from descriptors import open_descriptors
from tie.store.entries import PAGE, Entries, Entry, EntryTooLargeError, Limits, StoreFullError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def index(number: int) -> bytes:
    return number.to_bytes(32, "big")


def table(clock: Clock, **changes) -> Entries:
    values = {"capacity": 16 * PAGE, "max_entry": 4 * PAGE, "max_entries": 16, "ttl_s": 100.0, "turnover_s": 8.0}
    return Entries(Limits(**(values | changes)), clock, lambda descriptor, _: os.close(descriptor))


def put(entries: Entries, number: int, size: int = PAGE, ttl_s: float = 0) -> None:
    cost = entries.reserve(size)
    entries.file(index(number), Entry(os.open("/dev/null", os.O_RDONLY), size, cost, entries.expiry(ttl_s)))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def entries(clock):
    before = open_descriptors()
    entries = table(clock)
    yield entries
    entries.clear()
    assert open_descriptors() == before
    assert entries.used == 0


def test_what_is_filed_is_found_until_it_is_dropped(entries):
    put(entries, 1, 100)
    assert entries.get(index(1)).size == 100
    assert entries.used == PAGE
    assert entries.get(index(2)) is None
    assert entries.drop(index(1))
    assert not entries.drop(index(1))
    assert entries.get(index(1)) is None


def test_an_entry_replaces_its_namesake(entries):
    put(entries, 1, 100)
    put(entries, 1, 200)
    assert len(entries) == 1
    assert entries.get(index(1)).size == 200
    assert entries.counters.replaced == 1


def test_what_evicts_nobody_takes_what_is_free(entries, clock):
    for number in range(15):
        put(entries, number, ttl_s=10 if number == 3 else 0)
    entries.release(entries.reserve(PAGE, evicting=False))
    put(entries, 15)
    with pytest.raises(StoreFullError):
        entries.reserve(PAGE, evicting=False)
    assert len(entries) == 16
    clock.now += 10  # what is over makes room for everybody
    entries.release(entries.reserve(PAGE, evicting=False))
    assert len(entries) == 15
    assert entries.counters.evicted == 0


def test_a_renewed_entry_is_still_the_one_that_was_filed(entries):
    put(entries, 1)
    entry = entries.get(index(1))
    assert entries.renew(index(1), 10)
    entries.end(index(1), entry)
    assert entries.get(index(1)) is None


def test_an_entry_ends_with_its_time_and_not_later_than_the_store_allows(entries, clock):
    put(entries, 1, ttl_s=10)
    put(entries, 2, ttl_s=1e9)
    put(entries, 3)
    clock.now += 10
    assert entries.get(index(1)) is None
    assert not entries.renew(index(1), 10)
    assert entries.get(index(2))
    clock.now += 90
    assert entries.get(index(2)) is None
    assert entries.get(index(3)) is None
    assert len(entries) == 3
    entries.expire()
    assert len(entries) == 0
    assert entries.counters.expired == 3


def test_the_oldest_writes_go_first(entries, clock):
    for number in range(16):
        put(entries, number)
    put(entries, 0)  # written anew: now the youngest
    assert entries.renew(index(2), 0)
    clock.now += 8  # the budget is full
    put(entries, 16, 2 * PAGE)
    left = [number for number in range(17) if entries.get(index(number))]
    assert left == [0, 2, *range(4, 17)]


def test_what_is_larger_than_an_entry_may_be_is_refused(entries):
    for size in (0, -1, 4 * PAGE + 1, 1 << 60):
        with pytest.raises(EntryTooLargeError):
            entries.reserve(size)


def test_what_is_being_written_counts(entries):
    costs = [entries.reserve(4 * PAGE) for _ in range(4)]
    with pytest.raises(StoreFullError):
        entries.reserve(PAGE)
    entries.release(costs.pop())
    assert entries.reserve(4 * PAGE) == 4 * PAGE
    for cost in [*costs, 4 * PAGE]:
        entries.release(cost)
    assert entries.reserved == 0


def test_a_flood_is_refused_and_the_others_keep_what_they_have(entries, clock):
    """Everything may be pushed out in `turnover_s`, not in a moment."""
    for number in range(16):
        put(entries, number)
    written = 0
    for number in range(100, 200):
        try:
            put(entries, number)
        except StoreFullError:
            continue
        written += 1
    assert written == 4  # one largest entry's worth at once
    assert all(entries.get(index(number)) for number in range(4, 16))
    clock.now += 4  # half of the turnover: as much again as the bucket holds, no more
    for number in range(200, 300):
        try:
            put(entries, number)
        except StoreFullError:
            continue
        written += 1
    assert written == 8


def test_expired_entries_make_room_without_cost(entries, clock):
    for number in range(16):
        put(entries, number, ttl_s=1)
    clock.now += 1
    for number in range(100, 116):
        put(entries, number)
    assert entries.counters.evicted == 0


def test_many_small_entries_are_no_cheaper(clock):
    entries = table(clock, max_entries=4)
    for number in range(4):
        put(entries, number, 1)
    assert entries.used == 16 * PAGE
    clock.now += 8
    put(entries, 4, 1)
    assert len(entries) == 4
    entries.clear()


class Table(RuleBasedStateMachine):
    """Any history: within capacity, nothing lost, nothing leaked."""

    @initialize()
    def begin(self):
        self.clock = Clock()
        self.entries = table(self.clock)
        self.before = open_descriptors()
        self.pending: list[tuple[int, int]] = []
        self.written: dict[bytes, float] = {}

    @rule(size=st.integers(1, 5 * PAGE))
    def reserve(self, size):
        with contextlib.suppress(EntryTooLargeError, StoreFullError):
            self.pending.append((size, self.entries.reserve(size)))

    @rule(number=st.integers(0, 30), ttl_s=st.floats(0, 200))
    def file(self, number, ttl_s):
        if self.pending:
            size, cost = self.pending.pop()
            expires = self.entries.expiry(ttl_s)
            self.entries.file(index(number), Entry(os.open("/dev/null", os.O_RDONLY), size, cost, expires))
            self.written[index(number)] = expires

    @rule()
    def give_up(self):
        if self.pending:
            self.entries.release(self.pending.pop()[1])

    @rule(number=st.integers(0, 30))
    def drop(self, number):
        self.entries.drop(index(number))
        self.written.pop(index(number), None)

    @rule(number=st.integers(0, 30))
    def get(self, number):
        entry = self.entries.get(index(number))
        if entry:
            assert self.written[index(number)] == entry.expires > self.clock.now
            os.fstat(entry.descriptor)

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds):
        self.clock.now += seconds

    @invariant()
    def bounded(self):
        assert 0 <= self.entries.used + self.entries.reserved <= 16 * PAGE
        assert self.entries.reserved == sum(cost for _, cost in self.pending)
        assert open_descriptors() == self.before + len(self.entries)

    def teardown(self):
        self.entries.clear()


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
