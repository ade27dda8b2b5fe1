"""Rooms, the account of frames, paces: on a clock of the test's own. And the limits on connections, on real sockets."""

import asyncio

import pytest
from h2.errors import ErrorCodes
from hypothesis import given
from hypothesis import strategies as st

from tie.http.frame_guard import FloodError, FrameGuard
from tie.http.limits import Pace
from tie.http.rooms import Room, Rooms

SETTINGS = b"\0\0\0\4\0\0\0\0\0"
PING = b"\0\0\x08\6\0\0\0\0\0" + bytes(8)


class Guest:
    room: Room | None = None


ROOMS = {Room.IDLE: 10.0, Room.HEAD: 2.0, Room.LINGER: 5.0}


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, *Room]), st.floats(0, 3)), max_size=60))
def test_whoever_waits_longer_than_its_room_allows_is_late(moves: list[tuple[int, Room | None, float]]) -> None:
    rooms: Rooms[Guest] = Rooms(ROOMS)
    guests, since, now = [Guest() for _ in range(6)], {}, 0.0
    for number, room, pause in moves:
        now += pause
        guest = guests[number]
        if guest.room is not room:
            since[guest] = now
        rooms.put(guest, room, now)
        expected = {one for one in guests if one.room is not None and now - since[one] >= ROOMS[one.room]}
        late = list(rooms.late(now))
        assert set(late) == expected
        assert len(late) == len(expected)
        assert all(one.room is None for one in late)
        for one in late:
            since.pop(one)
    waiting = [one for one in guests if one.room is not None]
    first = rooms.first()
    assert (first is None) == (not waiting)
    if first is not None:
        order = list(Room)
        assert order.index(first.room) == min(order.index(one.room) for one in waiting)


@given(st.lists(st.integers(1, 40), max_size=60))
def test_the_guard_finds_frames_in_any_division(sizes: list[int]) -> None:
    most = SETTINGS + PING * 507  # 10 + 1,014 of 1,024
    guard, at = FrameGuard(0.0), 0
    for size in [*sizes, len(most)]:
        guard.watch(most[at : at + size], 0.0)
        at += size
    assert guard.begun
    with pytest.raises(FloodError) as flood:
        guard.watch(PING, 0.0)
    assert flood.value.code == ErrorCodes.ENHANCE_YOUR_CALM


def test_a_slow_stream_of_frames_is_no_flood() -> None:
    guard, now = FrameGuard(0.0), 0.0
    guard.watch(SETTINGS, now)
    for _ in range(1000):
        now += 1.0
        guard.watch(PING * 100, now)
    for _ in range(4):  # out of what is left
        guard.watch(PING * 100, now)
    with pytest.raises(FloodError):
        guard.watch(PING * 100, now)


def test_answers_earn_their_window_updates() -> None:
    guard = FrameGuard(0.0)
    guard.watch(SETTINGS, 0.0)
    update = b"\0\0\4\x08\0\0\0\0\0\0\0\0\1"
    for _ in range(5000):
        guard.earn(1)
        guard.watch(update * 2, 0.0)


def test_a_pace_is_the_tightest_of_its_three() -> None:
    pace = Pace(idle_s=5, whole_s=60, grace_s=10, bytes_per_s=100)
    assert pace.until(begun=0, now=0, received=0) == 5  # idle
    assert pace.until(begun=0, now=8, received=0) == 10  # the grace
    assert pace.until(begun=0, now=8, received=200) == 12  # the rate
    assert pace.until(begun=0, now=58, received=10**9) == 60  # the whole


async def test_the_longest_idle_makes_room_for_others(make_web) -> None:
    web = await make_web(connections=3)
    pairs = [await web.open() for _ in range(3)]
    await web.until(lambda: len(web.server) == 3)
    data = await web.say(b"GET / HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 200")
    assert await asyncio.wait_for(pairs[0][0].read(), 30) == b""
    assert web.server.displaced == 1


async def test_those_at_work_make_no_room(make_web) -> None:
    web = await make_web(connections=2, drain_s=0.1)

    async def hold(exchange) -> None:
        await asyncio.Event().wait()

    web.handler = hold
    pairs = [await web.open() for _ in range(2)]
    for _, writer in pairs:
        writer.write(b"GET / HTTP/1.1\r\nhost: node\r\n\r\n")
    await web.until(lambda: len(web.server._tasks) == 2)
    assert await web.say(b"GET / HTTP/1.1\r\nhost: node\r\n\r\n") == b""
    assert (web.server.refused, web.server.displaced) == (1, 0)


async def test_one_peer_has_its_limit(make_web) -> None:
    web = await make_web(connections_per_peer=2)
    for _ in range(2):
        await web.open()
    await web.until(lambda: len(web.server) == 2)
    assert await web.say(b"GET / HTTP/1.1\r\nhost: node\r\n\r\n") == b""
    _, other = await asyncio.open_connection("127.0.0.1", web.port, local_addr=("127.0.0.2", 0))
    web.writers.append(other)
    await web.until(lambda: len(web.server) == 3)
