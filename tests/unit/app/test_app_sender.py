"""The sender: every frame a bucket, text whole, one done; nothing leaves that cannot be padded."""

import asyncio
import socket
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tie.app.outcome import Outcome
from tie.app.sender import Sender, deltas
from tie.daemon.config import DEFAULT_BUCKETS, AppConfig
from tie.daemon.errors import PeerDiedError
from tie.daemon.frames import read_bytes
from tie.daemon.padding import PaddingError, room
from tie.proto import app_pb2

BUCKETS = [DEFAULT_BUCKETS, (32, 1024), (4096,)]


class Line:
    """A sender and what arrives at the other end."""

    async def open(self, config: AppConfig) -> "Line":
        ours, theirs = socket.socketpair()
        self.reader, self.other = await asyncio.open_unix_connection(sock=theirs)
        self.back, self.writer = await asyncio.open_unix_connection(sock=ours)
        self.sender = Sender(self.writer, config)
        return self

    async def close(self) -> None:
        for writer in (self.writer, self.other):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def received(self) -> tuple[list[int], list[app_pb2.AppOut]]:
        """Sizes and contents of all frames, to the end of the stream."""
        self.writer.write_eof()
        payloads = []
        while (payload := await read_bytes(self.reader, limit=1 << 21, timeout=5)) is not None:
            payloads.append(payload)
        return [len(payload) for payload in payloads], [app_pb2.AppOut.FromString(payload) for payload in payloads]


async def spoken(
    config: AppConfig, puts: Sequence[tuple[int, str]], outcome: Outcome
) -> tuple[list[int], list[app_pb2.AppOut]]:
    line = await Line().open(config)
    try:
        await line.sender.ready()
        running = asyncio.create_task(line.sender.run())
        for index, text in puts:
            line.sender.put(index, text)
            await asyncio.sleep(0)
        running.cancel()
        await line.sender.done(outcome)
        return await line.received()
    finally:
        await line.close()


# Every kind of character: one to four bytes, combining, right to left, zero-width; never half a surrogate pair.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=300).flatmap(
    lambda text: st.sampled_from([text, text * 7, text * 300])
)
outcomes = st.builds(
    Outcome,
    status=st.sampled_from(app_pb2.Status.values()),
    detail=texts,
    finishes=st.lists(
        st.builds(app_pb2.Finish, index=st.integers(0, 15), reason=st.sampled_from(app_pb2.FinishReason.values())),
        max_size=16,
    ).map(tuple),
    usage=st.builds(app_pb2.Usage, prompt_tokens=st.integers(0, 2**32 - 1), completion_tokens=st.integers(0, 9)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 15), texts), max_size=4), outcomes, st.sampled_from(BUCKETS))
def test_every_frame_has_a_bucket_size_and_nothing_is_lost(puts, outcome, buckets):
    config = AppConfig(buckets=buckets, tick_s=0.0)
    sizes, frames = asyncio.run(spoken(config, puts, outcome))
    assert set(sizes) <= set(buckets)
    kinds = [frame.WhichOneof("kind") for frame in frames]
    assert kinds == ["ready", *["delta"] * (len(kinds) - 2), "done"]
    for index in {index for index, _ in puts}:
        said = "".join(frame.delta.text for frame in frames if frame.HasField("delta") and frame.delta.index == index)
        assert said == "".join(text for at, text in puts if at == index)
    done = frames[-1].done
    assert done.status == outcome.status
    assert tuple(done.finish) == outcome.finishes
    assert outcome.detail.startswith(done.detail)
    assert done.detail == outcome.detail or len(done.detail.encode()) > room(buckets) - 200


@given(
    st.lists(
        st.builds(
            app_pb2.TokenLogprob,
            token=st.binary(max_size=20),
            logprob=st.floats(-20, 0, width=32),
            top=st.lists(st.builds(app_pb2.TopLogprob, token=st.binary(max_size=9), logprob=st.just(-1.0)), max_size=5),
        ),
        max_size=60,
    ),
    texts,
)
def test_logprobs_are_cut_between_entries(logprobs, text):
    made = list(deltas(3, text, logprobs, 600))
    assert "".join(delta.text for delta in made) == text
    assert [entry for delta in made for entry in delta.logprobs] == logprobs
    assert all(app_pb2.AppOut(delta=delta).ByteSize() <= 600 for delta in made)


def test_no_delta_comes_of_nothing():
    assert list(deltas(0, "", [], 600)) == []


async def test_deltas_are_gathered_until_the_tick(monkeypatch: pytest.MonkeyPatch):
    loop = asyncio.get_running_loop()
    now = loop.time
    line = await Line().open(AppConfig(tick_s=3600.0))
    running = asyncio.create_task(line.sender.run())
    for letter in "gathered":
        line.sender.put(0, letter)
        await asyncio.sleep(0)
    monkeypatch.setattr(loop, "time", lambda: now() + 3600.0)
    payload = await read_bytes(line.reader, limit=1 << 20, timeout=10)
    running.cancel()
    assert payload is not None
    assert app_pb2.AppOut.FromString(payload).delta.text == "gathered"
    await line.close()


@pytest.mark.parametrize(("characters", "sizes"), [(230, [256]), (700, [256] * 3), (940, [256] * 4), (1100, [4096])])
@pytest.mark.parametrize("ends", [False, True])
async def test_what_does_not_fit_a_small_frame_waits_for_the_next_tick(characters, sizes, ends):
    line = await Line().open(AppConfig(buckets=(256, 4096), tick_s=0.001))
    text = "".join(chr(ord("a") + number % 26) for number in range(characters))
    line.sender.put(0, text)
    running = asyncio.create_task(line.sender.run())
    said, seen = "", []
    while len(said) < (0 if ends else characters):
        payload = await read_bytes(line.reader, limit=1 << 20, timeout=10)
        assert payload is not None
        seen.append(len(payload))
        said += app_pb2.AppOut.FromString(payload).delta.text
    running.cancel()
    await line.sender.done(Outcome(app_pb2.STATUS_OK))
    left, frames = await line.received()
    said += "".join(frame.delta.text for frame in frames)
    assert (said, seen + left) == (text, [*sizes, 256])
    await line.close()


async def test_done_is_sent_once():
    line = await Line().open(AppConfig())
    await line.sender.done(Outcome(app_pb2.STATUS_OK))
    with pytest.raises(RuntimeError):
        await line.sender.done(Outcome(app_pb2.STATUS_OK))
    sizes, _ = await line.received()
    assert sizes == [DEFAULT_BUCKETS[0]]
    await line.close()


async def test_what_cannot_be_padded_is_not_sent():
    line = await Line().open(AppConfig(buckets=(64, 128)))
    line.sender.put(0, "kept back", [app_pb2.TokenLogprob(token=bytes(1000))])
    with pytest.raises(PaddingError):
        await line.sender.done(Outcome(app_pb2.STATUS_OK))
    many = tuple(app_pb2.Finish(index=index) for index in range(100))
    other = await Line().open(AppConfig(buckets=(64, 128)))
    with pytest.raises(PaddingError):
        await other.sender.done(Outcome(app_pb2.STATUS_OK, finishes=many))
    for each in (line, other):
        assert await each.received() == ([], [])
        await each.close()


async def test_a_jobhelper_that_is_gone_is_noticed():
    line = await Line().open(AppConfig())
    line.other.transport.abort()
    assert await asyncio.wait_for(line.back.read(), 5) == b""  # by now the kernel has said so
    with pytest.raises(PeerDiedError):
        await line.sender.ready()
    await line.close()
