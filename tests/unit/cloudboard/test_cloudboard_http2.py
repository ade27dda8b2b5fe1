"""HTTP/2 of the ingress on a real socket, against a real parser on the other side."""

import asyncio
import struct

import h2.events
import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import ContinuationFrame, HeadersFrame, PingFrame, RstStreamFrame

from tie.cloudboard.replies import reply as reply_of
from tie.http.exchange import Exchange
from tie.http.http2 import PREFACE
from tie.http.rooms import Room

DEADLINE_S = 60.0
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def goaway(data: bytes) -> ErrorCodes:
    """The code of the GOAWAY that ends `data`."""
    at, last = 0, None
    while at < len(data):
        length, kind = int.from_bytes(data[at : at + 3], "big"), data[at + 3]
        if kind == 7:
            last = ErrorCodes(struct.unpack(">I", data[at + 13 : at + 17])[0])
        at += 9 + length
    assert last is not None
    return last


async def hold(exchange: Exchange) -> None:
    """Begins an answer and never ends it."""
    await exchange.start("text/plain")
    await exchange.write(b"begun")
    await asyncio.Event().wait()


async def test_requests_side_by_side(web, http2) -> None:
    client = await http2(web.port)
    streams = [client.request() for _ in range(20)]
    for number, stream_id in enumerate(streams):
        client.body(stream_id, b"number %d" % number)
    for number, stream_id in enumerate(streams):
        assert await client.answer(stream_id) == (200, b"number %d" % number)


async def test_a_large_body_both_ways_keeps_to_the_windows(web, http2) -> None:
    client = await http2(web.port)
    stream_id, left = client.request(), 3_000_000
    while left:
        window = min(client.h2.local_flow_control_window(stream_id), client.h2.max_outbound_frame_size, left)
        if window:
            client.body(stream_id, bytes(window), end=window == left)
            left -= window
        else:
            assert await client.pump()
    status, data = await client.answer(stream_id)
    assert (status, len(data)) == (200, 3_000_000)


async def test_one_stream_is_reset_and_the_other_goes_on(web, http2) -> None:
    release = asyncio.Event()

    async def by_path(exchange: Exchange) -> None:
        if exchange.path == "/reset":
            await hold(exchange)
        await exchange.start("text/plain")
        await exchange.write(b"one ")
        await release.wait()
        await exchange.write(b"two")
        await exchange.finish()

    web.handler = by_path
    client = await http2(web.port)
    other, doomed = client.request("GET", "/", end=True), client.request("GET", "/reset", end=True)
    await client.until(h2.events.DataReceived, doomed)
    client.reset(doomed)
    await web.until(lambda: web.ended == ["cancelled"])
    release.set()
    assert await client.answer(other) == (200, b"one two")


async def test_late_data_for_a_refused_stream_leaves_the_others_alone(web, http2) -> None:
    async def refuse(exchange: Exchange) -> None:
        await (exchange.reply(reply_of("busy")) if exchange.method == "POST" else hold(exchange))

    web.handler = refuse
    client = await http2(web.port)
    other, refused = client.request("GET", end=True), client.request()
    assert await client.error(refused) == (503, "busy")
    for _ in range(100):  # far over the connection's window: what is dropped must be given back
        data = bytes(16_000)
        while client.h2.local_flow_control_window(refused) < len(data):
            assert await client.pump()
        client.body(refused, data, end=False)
    client.body(refused, b"", end=True)
    again = client.request()
    client.body(again, b"")
    assert await client.error(again) == (503, "busy")
    await client.until(h2.events.DataReceived, other)
    assert web.ended == ["done", "done"]


async def test_a_refused_upload_that_does_not_end_is_reset(make_web, http2) -> None:
    web = await make_web(linger_s=0.2)

    async def refuse(exchange: Exchange) -> None:
        await exchange.reply(reply_of("busy"))

    web.handler = refuse
    client = await http2(web.port)
    refused = client.request()
    assert await client.error(refused) == (503, "busy")
    reset = await client.until(h2.events.StreamReset, refused)
    assert reset.error_code == ErrorCodes.NO_ERROR
    client.events.clear()
    again = client.request()
    client.body(again, b"")
    assert await client.error(again) == (503, "busy")


async def test_a_client_that_goes_away_stops_all_its_work(web, http2) -> None:
    web.handler = hold
    client = await http2(web.port)
    for stream_id in [client.request("GET", end=True) for _ in range(3)]:
        await client.until(h2.events.DataReceived, stream_id)
    client.writer.close()
    await web.until(lambda: web.ended == ["cancelled"] * 3)
    await web.until(lambda: len(web.server) == 0)


async def test_a_goaway_of_the_client_stops_its_work(web, http2) -> None:
    web.handler = hold
    client = await http2(web.port)
    await client.until(h2.events.DataReceived, client.request("GET", end=True))
    client.h2.close_connection()
    client.flush()
    await web.until(lambda: web.ended == ["cancelled"])


async def test_a_stream_without_credit_waits_and_then_is_reset(make_web, http2) -> None:
    web = await make_web(write_s=0.5)

    async def large(exchange: Exchange) -> None:
        await exchange.start("text/plain")
        await exchange.write(bytes(10 if exchange.path == "/small" else 200_000))
        await exchange.finish()

    web.handler = large
    client = await http2(web.port)
    client.h2.increment_flow_control_window(2**20)  # of the connection, not of its streams
    client.flush()
    client.acknowledging = False
    stalled = client.request("GET", end=True)
    reset = await client.until(h2.events.StreamReset, stalled)
    assert reset.error_code == ErrorCodes.CANCEL
    assert web.ended == ["disconnected"]
    assert await client.answer(client.request("GET", "/small", end=True)) == (200, bytes(10))


async def test_credit_that_comes_late_is_used(web, http2) -> None:
    async def large(exchange: Exchange) -> None:
        await exchange.start("text/plain")
        await exchange.write(bytes(200_000))
        await exchange.finish()

    web.handler = large
    client = await http2(web.port)
    client.acknowledging = False
    stream_id = client.request("GET", end=True)
    while client.h2.remote_flow_control_window(stream_id) > 0:
        assert await client.pump()
    client.h2.increment_flow_control_window(200_000, stream_id)
    client.h2.increment_flow_control_window(200_000)
    client.flush()
    assert (await client.answer(stream_id))[1] == bytes(200_000)


async def test_a_client_that_does_not_read_at_all(make_web, http2) -> None:
    web = await make_web(write_s=0.5)

    async def flood(exchange: Exchange) -> None:
        await exchange.start("text/plain")
        while True:
            await exchange.write(bytes(65536))

    web.handler = flood
    client = await http2(web.port)
    client.h2.increment_flow_control_window(2**30)
    stream_id = client.request("GET")
    client.h2.increment_flow_control_window(2**30, stream_id)
    client.flush()
    client.reader._transport.pause_reading()
    await web.until(lambda: web.ended == ["disconnected"])
    await web.until(lambda: not web.server._tasks)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"garbage garbage garbage", ErrorCodes.PROTOCOL_ERROR),
        (b"GET / HTTP/1.1\r\n\r\n", ErrorCodes.PROTOCOL_ERROR),
        (SETTINGS[:3] + b"\6" + SETTINGS[4:], ErrorCodes.PROTOCOL_ERROR),  # a ping before the settings
        (SETTINGS + b"\x01\x00\x00\x00\x00\x00\x00\x00\x01", ErrorCodes.FRAME_SIZE_ERROR),
        (SETTINGS + b"\x00\x00\x01\x01\x05\x00\x00\x00\x01\xff", ErrorCodes.PROTOCOL_ERROR),  # no HPACK
        (SETTINGS + b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00", ErrorCodes.PROTOCOL_ERROR),
    ],
)
async def test_what_is_no_http2_ends_the_connection_at_once(web, data: bytes, code: ErrorCodes) -> None:
    assert goaway(await web.say(PREFACE + data)) == code
    await web.until(lambda: len(web.server) == 0)


@pytest.mark.parametrize("data", [PREFACE[:10], PREFACE, PREFACE + SETTINGS[:5]])
async def test_a_beginning_that_drips(make_web, data: bytes) -> None:
    web = await make_web(head_s=0.2)
    await web.say(data)
    await web.until(lambda: len(web.server) == 0)


async def test_an_idle_connection_is_told_to_go(web, http2) -> None:
    client = await http2(web.port)
    stream_id = client.request()
    client.body(stream_id, b"")
    await client.answer(stream_id)
    web.hurry(Room.IDLE)
    ended = await client.until(h2.events.ConnectionTerminated)
    assert ended.error_code == ErrorCodes.NO_ERROR
    assert not await client.pump()


async def test_pings_keep_no_connection_alive(web, http2) -> None:
    client = await http2(web.port)
    await client.until(h2.events.SettingsAcknowledged)
    web.hurry(Room.IDLE, 0.5)

    async def ping() -> None:
        while not client.closed:
            client.writer.write(PingFrame(0, b"12345678").serialize())
            await asyncio.sleep(0.05)

    pinging = asyncio.create_task(ping())
    ended = await client.until(h2.events.ConnectionTerminated)
    assert ended.error_code == ErrorCodes.NO_ERROR
    pinging.cancel()


async def test_rapid_resets_end_the_connection(web, http2) -> None:
    web.handler = hold
    client = await http2(web.port)
    for _ in range(1000):
        client.reset(client.request("GET", end=True))
    ended = await client.until(h2.events.ConnectionTerminated)
    assert ended.error_code == ErrorCodes.ENHANCE_YOUR_CALM
    await web.until(lambda: not web.server._tasks)
    assert set(web.ended) <= {"cancelled"}


async def test_a_header_block_without_end(web) -> None:
    block = HeadersFrame(1, b"\x82").serialize()
    data = await web.say(PREFACE + SETTINGS + block + ContinuationFrame(1, bytes(1000)).serialize() * 50)
    assert goaway(data) == ErrorCodes.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "frame",
    [PingFrame(0, bytes(8)).serialize(), SETTINGS, b"\0\0\0\0\0\0\0\0\1", RstStreamFrame(1, 0).serialize()],
    ids=["ping", "settings", "empty data", "reset"],
)
async def test_floods_of_small_frames(web, http2, frame: bytes) -> None:
    client = await http2(web.port)
    client.request()
    await asyncio.sleep(0)
    client.writer.write(frame * 5000)
    ended = await client.until(h2.events.ConnectionTerminated)
    assert ended.error_code == ErrorCodes.ENHANCE_YOUR_CALM


async def test_more_streams_than_allowed(make_web, http2) -> None:
    web = await make_web(streams=3)
    web.handler = hold
    client = await http2(web.port)
    await client.until(h2.events.RemoteSettingsChanged)
    assert client.h2.remote_settings.max_concurrent_streams == 3
    client.h2.remote_settings.update({3: 100})
    client.h2.remote_settings.acknowledge()
    for _ in range(4):
        client.request("GET", end=True)
    ended = await client.until(h2.events.ConnectionTerminated)
    assert ended.error_code == ErrorCodes.PROTOCOL_ERROR
    await web.until(lambda: not web.server._tasks)


async def test_more_streams_on_all_connections_than_allowed(make_web, http2) -> None:
    web = await make_web(all_streams=3, linger_s=DEADLINE_S)

    async def refuse(exchange: Exchange) -> None:
        await (exchange.reply(reply_of("busy")) if exchange.method == "POST" else hold(exchange))

    web.handler = refuse
    working, lingering, late = [await http2(web.port) for _ in range(3)]
    for _ in range(2):
        await working.until(h2.events.DataReceived, working.request("GET", end=True))
    refused = lingering.request()  # answered, and its body still counts
    assert await lingering.error(refused) == (503, "busy")
    reset = await late.until(h2.events.StreamReset, late.request("GET", end=True))
    assert reset.error_code == ErrorCodes.REFUSED_STREAM
    lingering.body(refused, b"")
    await web.until(lambda: web.server._streams == 2)
    await late.until(h2.events.DataReceived, late.request("GET", end=True))
    working.writer.close()
    late.writer.close()
    await web.until(lambda: web.server._streams == 0)


async def test_a_stop_lets_requests_finish_and_takes_no_new_ones(web, http2) -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.start("text/plain")
        await exchange.write(b"one ")
        await release.wait()
        await exchange.write(b"two")
        await exchange.finish()

    web.handler = slow
    client, idle = await http2(web.port), await http2(web.port)
    await idle.until(h2.events.RemoteSettingsChanged)
    client.request("GET", end=True)
    await client.until(h2.events.DataReceived)
    web.stopping.set()
    assert (await idle.until(h2.events.ConnectionTerminated)).error_code == ErrorCodes.NO_ERROR
    # The test's own parser would not go on after the GOAWAY, so its bytes are looked at as they are.
    data = b""
    while b"\0\0\0\7" not in data[3:] and len(data) < 17:
        data += await asyncio.wait_for(client.reader.read(1000), 30)
    assert goaway(data) == ErrorCodes.NO_ERROR
    with pytest.raises(ConnectionError):
        await web.open()
    release.set()
    rest = await asyncio.wait_for(client.reader.read(), 30)
    assert b"two" in rest
    assert web.ended == ["done"]


async def test_a_stop_does_not_wait_for_ever(make_web, http2) -> None:
    web = await make_web(drain_s=0.2)
    web.handler = hold
    client = await http2(web.port)
    await client.until(h2.events.DataReceived, client.request("GET", end=True))
    await web.stop()
    assert web.ended == ["cancelled"]
    assert len(web.server) == 0
