"""One request and its two attempts: jobhelpers that are played say what a client is told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tie.cloudboard import standby
from tie.cloudboard.job import Job
from tie.cloudboard.registry import Registry
from tie.cloudboard.standby import StandbyPool
from tie.cloudboard.uploads import Uploads
from tie.daemon import frames
from tie.daemon.config import NodeConfig
from tie.http.exchange import Exchange
from tie.http.reply import RefusedRequestError
from tie.proto import envelope_pb2

DEADLINE_S = 60.0
ORDER = envelope_pb2.JobOpen(request_id="r1")
Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def say(writer: asyncio.StreamWriter, message: envelope_pb2.JobOut) -> None:
    await frames.write_message(writer, message, timeout=DEADLINE_S)


async def hear(reader: asyncio.StreamReader) -> list[envelope_pb2.JobIn]:
    """The whole request."""
    heard: list[envelope_pb2.JobIn] = []
    while not heard or not heard[-1].segment.last:
        message = await frames.read_message(reader, envelope_pb2.JobIn, limit=1 << 20, timeout=DEADLINE_S)
        assert message is not None
        heard.append(message)
    return heard


def ending(status: "envelope_pb2.JobStatus.ValueType") -> Play:
    """A jobhelper that takes the request and ends it with `status`."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await say(writer, envelope_pb2.JobOut(ready=envelope_pb2.JobReady()))
        await hear(reader)
        await say(writer, envelope_pb2.JobOut(done=envelope_pb2.JobDone(status=status)))
        await reader.read()

    return play


async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await say(writer, envelope_pb2.JobOut(ready=envelope_pb2.JobReady()))
    await hear(reader)


async def absent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    del reader, writer


async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Neither reads nor ends."""
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    await say(writer, envelope_pb2.JobOut(ready=envelope_pb2.JobReady()))
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def played(path: Path, plays: list[Play]) -> AsyncIterator[StandbyPool]:
    """A pool whose jobhelpers do what `plays` say, one after another."""
    coming = iter(plays)
    playing: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        playing.add(task)
        try:
            await next(coming)(reader, writer)
        finally:
            writer.transport.abort()

    async with await asyncio.start_unix_server(serve, path):
        yield StandbyPool(path, 0, Registry("node-0", 1))
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


class Stream:
    """The connection's side."""

    def head(self, *_: object) -> None:
        raise AssertionError("nothing was accepted")


async def outcome(path: Path, *plays: Play, size: int = 100) -> str:
    """The code that a client would be told."""
    exchange = Exchange("POST", "/v1/requests", [], Stream(), DEADLINE_S)  # type: ignore[arg-type]
    async with played(path, list(plays)) as pool:
        with Uploads(NodeConfig()).begin() as upload:
            for last in [*[False] * (size // 50_000), True]:
                upload.add(envelope_pb2.SealedSegment(ciphertext=bytes(min(size, 50_000)), last=last))
            with pytest.raises(RefusedRequestError) as refused:
                await asyncio.wait_for(Job(exchange, ORDER, upload, pool).run(), DEADLINE_S)
    return refused.value.code


BUSY = ending(envelope_pb2.JOB_BUSY)
REPLAYED = ending(envelope_pb2.JOB_REPLAYED)


@pytest.mark.parametrize(
    ("plays", "code"),
    [
        # Nobody has read anything.
        ([absent], "busy"),
        ([BUSY, absent], "busy"),
        ([BUSY, BUSY], "busy"),
        ([BUSY, REPLAYED], "busy"),
        ([BUSY, ending(envelope_pb2.JOB_UNAVAILABLE)], "unavailable"),
        ([ending(envelope_pb2.JOB_UNAVAILABLE)], "unavailable"),
        ([ending(envelope_pb2.JOB_UNKNOWN_KEY)], "unknown_key"),
        # The first may have had it read, whatever the second says of itself.
        ([dying, absent], "failed"),
        ([dying, BUSY], "failed"),
        ([dying, REPLAYED], "failed"),
        ([dying, ending(envelope_pb2.JOB_UNAVAILABLE)], "failed"),
        ([dying, ending(envelope_pb2.JOB_UNKNOWN_KEY)], "failed"),
        # Or the second.
        ([BUSY, dying], "failed"),
        ([dying, dying], "failed"),
        # What is true of the request, whoever looks at it.
        ([dying, ending(envelope_pb2.JOB_REFUSED)], "refused"),
        ([dying, ending(envelope_pb2.JOB_TOO_LARGE)], "too_large"),
    ],
)
async def test_only_what_nobody_can_have_read_may_be_sent_again(tmp_path: Path, plays: list[Play], code: str) -> None:
    assert await outcome(tmp_path / "jobhelper.sock", *plays) == code


async def test_a_jobhelper_that_does_not_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "WRITE_S", 0.2)
    assert await outcome(tmp_path / "jobhelper.sock", stuck, REPLAYED, size=5_000_000) == "failed"
