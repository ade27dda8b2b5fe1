"""The relay's reading of what an app sends: only whole, padded, known frames pass."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.cloudboard.relay import Link, read_app
from tie.daemon.config import AppConfig
from tie.daemon.errors import PeerError, ProtocolError
from tie.daemon.frames import frame
from tie.daemon.padding import pad
from tie.proto import app_pb2

CONFIG = AppConfig()


def read(data: bytes) -> tuple[str, bytes]:
    async def run() -> tuple[str, bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_app(CONFIG, Link(reader, None), 5.0)  # type: ignore[arg-type]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (app_pb2.AppOut(ready=app_pb2.Ready()), "ready"),
        (app_pb2.AppOut(delta=app_pb2.Delta(text="é" * 90)), "delta"),
        (app_pb2.AppOut(done=app_pb2.Done(status=app_pb2.STATUS_BUSY)), "done"),
    ],
)
def test_padded_frames_pass_unchanged(message: app_pb2.AppOut, kind: str) -> None:
    payload = pad(message, CONFIG.buckets)
    assert read(frame(payload)) == (kind, payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(PeerError):  # nothing passes by chance
        read(data)


@given(st.text(max_size=200), st.dictionaries(st.integers(0, 63), st.integers(0, 255), max_size=3))
def test_a_changed_frame_is_a_padded_frame_of_its_size_or_an_error(text: str, changes: dict[int, int]) -> None:
    sent = bytearray(pad(app_pb2.AppOut(delta=app_pb2.Delta(text=text)), CONFIG.buckets))
    for place, value in changes.items():
        sent[place] = value
    try:
        kind, payload = read(frame(bytes(sent)))
    except ProtocolError:
        assert changes
        return
    assert payload == sent
    assert kind == app_pb2.AppOut.FromString(payload).WhichOneof("kind")


@given(st.integers(0, 300))
def test_another_size_does_not_pass(size: int) -> None:
    message = app_pb2.AppOut(delta=app_pb2.Delta(text="x" * size))
    payload = message.SerializeToString()
    if len(payload) not in CONFIG.buckets:
        with pytest.raises(ProtocolError):
            read(frame(payload))


def test_a_padded_nothing_does_not_pass() -> None:
    with pytest.raises(ProtocolError):
        read(frame(pad(app_pb2.AppOut(), CONFIG.buckets)))
