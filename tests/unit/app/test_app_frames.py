"""The order of the jobhelper's messages: every state against every message, and bytes that are anything at all."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.app.frames import Incoming, Limits, State
from tie.app.outcome import RefusalError
from tie.daemon.config import AppConfig
from tie.daemon.frames import frame
from tie.proto import app_pb2

OPEN = app_pb2.AppIn(open=app_pb2.Open(request_id="r", dek=bytes(32)))
PART = app_pb2.AppIn(body=app_pb2.Body(data=b"ab"))
LAST = app_pb2.AppIn(body=app_pb2.Body(data=b"cd", last=True))
ABORT = app_pb2.AppIn(abort=app_pb2.Abort())
EMPTY = app_pb2.AppIn()
MESSAGES = {"open": OPEN, "part": PART, "last": LAST, "abort": ABORT, "empty": EMPTY}
CONFIG = AppConfig(idle_timeout_s=0.05)


def incoming(*messages: app_pb2.AppIn | bytes, config: AppConfig = CONFIG, end: bool = True) -> Incoming:
    reader = asyncio.StreamReader()
    for message in messages:
        reader.feed_data(message if isinstance(message, bytes) else frame(message.SerializeToString()))
    if end:
        reader.feed_eof()
    return Incoming(reader, config)


async def conversation(side: Incoming) -> bytes | None:
    """As the session listens: open, body, then a watch for the rest."""
    if await side.open() is None:
        return None
    body = await side.body(1000)
    await side.watch()
    return body


def expected(names: tuple[str, ...]) -> str:
    """The status that a conversation of these messages, then the end, must have: written out apart from the table."""
    if not names:
        return ""
    for position, name in enumerate(names):
        complete = "last" in names[:position]
        if name == "abort":
            return "CANCELLED"
        if (position == 0) != (name == "open") or name == "empty" or complete:
            return "PROTOCOL_ERROR"
    return "CANCELLED" if "last" in names else "PROTOCOL_ERROR"


@pytest.mark.parametrize("length", range(5))
async def test_every_sequence_of_messages_has_its_one_status(length):
    for names in itertools.product(MESSAGES, repeat=length):
        try:
            outcome = await conversation(incoming(*(MESSAGES[name] for name in names)))
        except RefusalError as refusal:
            status = app_pb2.Status.Name(refusal.status).removeprefix("STATUS_")
        else:
            assert outcome is None
            status = ""
        assert (names, status) == (names, expected(names))


async def test_the_body_is_put_together():
    side = incoming(OPEN, PART, PART, LAST, end=False)
    opened = await side.open()
    assert opened is not None
    assert opened.request_id == "r"
    assert await side.body(6) == b"ababcd"
    assert side.state is State.COMPLETE


async def refused(awaitable) -> str:
    with pytest.raises(RefusalError) as caught:
        await awaitable
    return app_pb2.Status.Name(caught.value.status)


async def test_a_body_over_the_limit_is_refused_as_soon_as_it_is():
    side = incoming(OPEN, PART, PART, end=False)
    await side.open()
    assert await refused(side.body(3)) == "STATUS_REQUEST_TOO_LARGE"


async def test_a_message_over_the_limit_is_refused():
    side = incoming(OPEN, config=AppConfig(max_message_bytes=10), end=False)
    assert await refused(side.open()) == "STATUS_REQUEST_TOO_LARGE"


async def test_silence_in_the_middle_of_a_body_is_given_up_and_before_it_is_not():
    side = incoming(OPEN, PART, end=False)
    await side.open()
    assert await refused(side.body(100)) == "STATUS_DEADLINE_EXCEEDED"
    waiting = asyncio.create_task(incoming(end=False).open())
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    waiting.cancel()


@pytest.mark.parametrize(
    "opened",
    [
        app_pb2.Open(request_id="r"),
        app_pb2.Open(request_id="r", dek=bytes(31)),
        app_pb2.Open(dek=bytes(32)),
        app_pb2.Open(request_id="r" * 65, dek=bytes(32)),
    ],
)
async def test_an_open_that_cannot_be_is_a_protocol_error(opened):
    assert await refused(incoming(app_pb2.AppIn(open=opened)).open()) == "STATUS_PROTOCOL_ERROR"


@given(st.binary(max_size=400))
def test_any_bytes_at_all_end_in_a_status(data):
    async def listen() -> None:
        try:
            outcome = await conversation(incoming(data))
        except RefusalError:
            return
        assert outcome is None
        assert data == b""

    asyncio.run(listen())


def test_limits_can_only_be_lowered():
    config = AppConfig(max_request_bytes=100, max_output_tokens=10, time_limit_s=5.0)
    assert Limits.of(config, app_pb2.Limits()) == Limits(100, 10, 5.0)
    raised = app_pb2.Limits(max_request_bytes=999, max_output_tokens=999, time_limit_ms=999_000)
    assert Limits.of(config, raised) == Limits(100, 10, 5.0)
    lowered = app_pb2.Limits(max_request_bytes=50, max_output_tokens=5, time_limit_ms=500)
    assert Limits.of(config, lowered) == Limits(50, 5, 0.5)
