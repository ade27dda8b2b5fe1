"""HTTP/1.1 of the ingress on a real socket."""

import asyncio
import json

import pytest

from tie.cloudboard.replies import reply as reply_of
from tie.http.exchange import Exchange
from tie.http.limits import Pace
from tie.http.rooms import Room

GET = b"GET /x?y HTTP/1.1\r\nhost: node\r\n\r\n"
LAST = b"GET /x HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\r\n"


def reply(data: bytes) -> tuple[int, str]:
    """Status and code of the last response in `data`."""
    head, _, text = data.rpartition(b"\r\n\r\n")
    lines = head.split(b"\r\n\r\n")[-1].split(b"\r\n")
    assert b"content-type: application/json" in lines
    return int(lines[0].split()[1]), json.loads(text)["error"]


async def path(exchange: Exchange) -> None:
    await exchange.start("text/plain")
    await exchange.write(exchange.path.encode())
    await exchange.finish()


async def test_requests_follow_one_another_on_one_connection(web) -> None:
    web.handler = path
    data = await web.say(GET + GET + LAST)
    assert data.count(b"HTTP/1.1 200") == 3
    assert data.count(b"/x\r\n") == 3
    assert b"date: " in data


async def test_a_body_in_chunks_and_with_a_length(web) -> None:
    start = b"POST / HTTP/1.1\r\nhost: node\r\n"
    chunked = start + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    plain = start + b"connection: close\r\ncontent-length: 3\r\n\r\nfgh"
    data = await web.say(chunked + plain)
    assert b"\r\nabcde\r\n" in data
    assert b"\r\nfgh\r\n" in data


async def test_a_large_body_comes_through_whole(web) -> None:
    size = 3_000_000
    data = await web.say(
        b"POST / HTTP/1.1\r\nhost: node\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)
    )
    assert data.count(b"\0") == size


async def test_a_client_that_waits_to_be_asked_for_its_body(web) -> None:
    reader, writer = await web.open()
    writer.write(b"POST / HTTP/1.1\r\nhost: node\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
    assert b" 100 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    writer.write(b"ok")
    assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"ok\r\n"), 30)
    writer.close()


async def test_a_refused_body_is_not_asked_for(web) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.reply(reply_of("busy"))

    web.handler = refuse
    data = await web.say(b"POST / HTTP/1.1\r\nhost: node\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
    assert reply(data) == (503, "busy")
    assert b"HTTP/1.1 100" not in data
    assert b"connection: close" in data


async def test_head_has_no_body(web) -> None:
    web.handler = path
    data = await web.say(LAST.replace(b"GET", b"HEAD"))
    assert data.startswith(b"HTTP/1.1 200")
    assert data.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"garbage\r\n\r\n", (400, "bad_request")),
        (b"GET / HTTP/1.1\r\n\r\n", (400, "bad_request")),  # no host
        (b"GET / HTTP/3.7\r\nhost: node\r\n\r\n", (400, "bad_request")),
        (b"GET / HTTP/1.1\r\nhost: node\r\nbad header\r\n\r\n", (400, "bad_request")),
        (b"POST / HTTP/1.1\r\nhost: node\r\ncontent-length: x\r\n\r\n", (400, "bad_request")),
        (b"POST / HTTP/1.1\r\nhost: node\r\ntransfer-encoding: gzip\r\n\r\n", (400, "bad_request")),
        (b"POST / HTTP/1.1\r\nhost: node\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", (400, "bad_request")),
        (b"PRI * HTTP/2.0\r\nhost: node\r\n\r\n", (400, "bad_request")),  # not quite the preface
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400, "bad_request")),  # TLS
        (b"\0" * 20_000, (400, "bad_request")),
        (b"GET / HTTP/1.1\r\nhost: node\r\nx: " + b"y" * 20_000, (431, "headers_too_large")),
        (b"GET /" + b"y" * 20_000, (431, "headers_too_large")),
    ],
)
async def test_what_is_no_http_is_answered_in_json_and_closed(web, data: bytes, expected: tuple[int, str]) -> None:
    assert reply(await web.say(data)) == expected
    await web.until(lambda: len(web.server) == 0)


async def test_garbage_after_a_request_does_not_harm_its_answer(web) -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await release.wait()
        await path(exchange)

    web.handler = slow
    reader, writer = await web.open()
    writer.write(GET + b"garbage\r\n\r\n")
    writer.write(b"more garbage" * 20_000)
    await asyncio.sleep(0)
    release.set()
    assert b"/x\r\n" in await asyncio.wait_for(reader.read(), 30)
    writer.close()


async def test_a_head_that_drips(make_web) -> None:
    web = await make_web(head_s=0.3)
    reader, writer = await web.open()
    writer.write(b"GET / HTTP/1.1\r\nhost")
    data = await asyncio.wait_for(reader.read(), 30)
    assert reply(data) == (408, "timeout")
    writer.close()


async def test_dripping_on_does_not_help(make_web) -> None:
    web = await make_web(head_s=0.5)
    reader, writer = await web.open()

    async def drip() -> None:
        writer.write(b"GET / HTTP/1.1\r\n")
        while not writer.is_closing():
            writer.write(b"x: y\r\n")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    assert reply(await asyncio.wait_for(reader.read(), 30)) == (408, "timeout")
    dripping.cancel()
    writer.close()


async def test_a_body_that_drips(web) -> None:
    async def take(exchange: Exchange) -> None:
        pace = Pace(idle_s=60, whole_s=60, grace_s=0.3, bytes_per_s=1e6)
        async for _ in exchange.chunks(pace):
            pass

    web.handler = take
    reader, writer = await web.open()
    writer.write(b"POST / HTTP/1.1\r\nhost: node\r\ncontent-length: 100000\r\n\r\n")

    async def drip() -> None:
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    assert reply(await asyncio.wait_for(reader.read(), 30)) == (408, "timeout")
    dripping.cancel()
    writer.close()


async def test_an_idle_connection_is_closed(web) -> None:
    web.handler = path
    reader, writer = await web.open()
    silent, _ = await web.open()
    writer.write(GET)
    assert b"200" in await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 30)
    web.hurry(Room.IDLE)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    assert await asyncio.wait_for(silent.read(), 30) == b""


async def test_a_request_cut_short_is_answered(web) -> None:
    reader, writer = await web.open()
    writer.write(b"POST / HTTP/1.1\r\nhost: node\r\ncontent-length: 10\r\n\r\nabc")
    writer.write_eof()
    assert reply(await asyncio.wait_for(reader.read(), 30)) == (400, "truncated")
    writer.close()


async def test_a_client_that_goes_away_stops_the_work(web) -> None:
    begun = asyncio.Event()

    async def forever(exchange: Exchange) -> None:
        await exchange.start("text/plain")
        begun.set()
        await asyncio.Event().wait()

    web.handler = forever
    for abort in (False, True):
        begun.clear()
        _, writer = await web.open()
        writer.write(GET)
        await begun.wait()
        if abort:
            writer.transport.abort()
        writer.close()
        await web.until(lambda: len(web.server) == 0)
    assert web.ended == ["cancelled"] * 2


async def test_a_client_that_does_not_read_is_let_go(make_web) -> None:
    web = await make_web(write_s=0.3)
    sent = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.start("text/plain")
        while True:
            await exchange.write(bytes(65536))
            sent += 65536

    web.handler = flood
    reader, writer = await web.open()
    writer.write(GET)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    await web.until(lambda: web.ended == ["disconnected"])
    assert sent < 64 << 20  # what the kernel's buffers take, and no more
    await web.until(lambda: len(web.server) == 0)
    writer.close()


async def test_a_handler_that_fails_ends_its_connection_only(web) -> None:
    async def fail(exchange: Exchange) -> None:
        raise RuntimeError

    web.handler = fail
    assert await web.say(GET) == b""
    web.handler = path
    assert b"200" in await web.say(LAST)


async def test_a_client_that_does_not_read_is_not_read_from_after_its_answer_either(web) -> None:
    size = 32 << 20

    async def pour(exchange: Exchange) -> None:
        await exchange.start("text/plain", headers=[(b"content-length", b"%d" % size)])
        await exchange.write(bytes(size))
        await exchange.finish()

    web.handler = pour
    reader, writer = await web.open()
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(GET)
    await web.until(lambda: web.ended == ["done"])
    await asyncio.sleep(0)
    (connection,) = web.server._connections
    assert connection.held
    assert not connection._transport.is_reading()
    reader._transport.resume_reading()  # type: ignore[attr-defined]
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    await asyncio.wait_for(reader.readexactly(size), 30)
    web.handler = path
    writer.write(LAST)
    assert b" 200 " in await asyncio.wait_for(reader.read(), 30)
