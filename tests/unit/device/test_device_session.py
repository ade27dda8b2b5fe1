"""One sealed request and its answer, on the wire's bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.daemon.config import DEFAULT_BUCKETS
from tie.daemon.errors import PeerTimeoutError, TieError
from tie.daemon.padding import pad
from tie.device.errors import NodeBusyError, NodeFailedError, RequestRefusedError, TruncatedError, from_done
from tie.device.session import Session, reply_error
from tie.envelope import sealing, stream
from tie.envelope.errors import EnvelopeError
from tie.envelope.frames import FrameSplitter, frame
from tie.envelope.statement import NodeKey
from tie.proto import app_pb2, envelope_pb2, request_pb2

KEY = sealing.PrivateKey.generate()
NODE = NodeKey("node-0", KEY.public, 2**40)
SALT = bytes(range(32))


def session(text: str = "hello") -> Session:
    request = request_pb2.InferenceRequest(model="m")
    request.messages.add(role="user").parts.add(text=text)
    return Session(NODE, request)


def received(body: bytes) -> tuple[sealing.Header, list[envelope_pb2.SealedSegment]]:
    """What a node parses."""
    first, *rest = [envelope_pb2.SealedIn.FromString(payload) for payload in FrameSplitter(1 << 20).feed(body)]
    header = first.header
    assert header.version == sealing.VERSION
    clear = sealing.Header(header.node_id, header.key_id, header.sealed_dek, header.model)
    return clear, [message.segment for message in rest]


def answer(one: Session, *messages: app_pb2.AppOut) -> bytes:
    """What a node sends back."""
    header, _ = received(one.body)
    dek = sealing.open_dek(header.sealed_dek, "node-0", KEY)
    sealer = stream.Sealer(sealing.response_key(dek, header, SALT), stream.Direction.RESPONSE)
    parts = [SALT]
    for message in messages:
        last = message.HasField("done")
        ciphertext = sealer.seal(pad(message, DEFAULT_BUCKETS), last=last)
        parts.append(frame(stream.pack_segment(ciphertext, last=last)))
    return b"".join(parts)


def read_all(one: Session, data: bytes) -> None:
    list(one.feed(data))
    one.end()


def delta(text: str, index: int = 0) -> app_pb2.AppOut:
    return app_pb2.AppOut(delta=app_pb2.Delta(text=text, index=index))


def done(status: app_pb2.Status.ValueType = app_pb2.STATUS_OK, detail: str = "") -> app_pb2.AppOut:
    return app_pb2.AppOut(done=app_pb2.Done(status=status, detail=detail))


@given(st.text(max_size=100_000))
def test_the_node_can_open_what_was_sealed(text: str) -> None:
    header, segments = received(session(text).body)
    dek = sealing.open_dek(header.sealed_dek, "node-0", KEY)
    opener = stream.Opener(sealing.request_key(dek, header), stream.Direction.REQUEST)
    plaintext = b"".join(opener.open(segment.ciphertext, last=segment.last) for segment in segments)
    opener.finish()
    assert request_pb2.InferenceRequest.FromString(plaintext).messages[0].parts[0].text == text
    assert len(plaintext).bit_count() == 1


def test_sizes_follow_the_padded_size_only() -> None:
    assert len({len(session("x" * length).body) for length in (0, 10, 500, 900)}) == 1


def test_no_two_requests_share_a_key() -> None:
    assert received(session().body)[0].sealed_dek != received(session().body)[0].sealed_dek


@given(st.lists(st.integers(1, 40), max_size=30))
def test_any_division_into_chunks_is_the_same_answer(sizes: list[int]) -> None:
    one = session()
    data = answer(one, delta("a"), delta("b", 1), delta("c"), done())
    texts = []
    for size in sizes:
        texts += [piece.text for piece in one.feed(data[:size])]
        data = data[size:]
    texts += [piece.text for piece in one.feed(data)]
    assert texts == ["a", "b", "c"]
    assert one.end().texts == ("ac", "b")


@given(st.integers(0, 400))
def test_an_answer_cut_short_is_noticed(length: int) -> None:
    one = session()
    data = answer(one, delta("a"), delta("b"), done())
    list(one.feed(data[: min(length, len(data) - 1)]))
    with pytest.raises(TruncatedError):
        one.end()


@given(st.binary(max_size=500))
def test_any_bytes_are_an_error_and_nothing_else(data: bytes) -> None:
    one = session()
    with pytest.raises(TieError):
        read_all(one, SALT + data)


@given(st.data())
def test_a_flipped_bit_is_noticed(data: st.DataObject) -> None:
    one = session()
    whole = bytearray(answer(one, delta("a"), done()))
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TieError):
        read_all(one, bytes(whole))


def test_more_after_the_end() -> None:
    one = session()
    whole = answer(one, done())
    with pytest.raises(EnvelopeError):
        list(one.feed(whole + whole[32:]))


def test_another_sessions_answer_does_not_open() -> None:
    with pytest.raises(EnvelopeError):
        list(session().feed(answer(session(), done())))


def test_an_impossible_choice_is_refused() -> None:
    one = session()
    with pytest.raises(TieError, match="impossible"):
        list(one.feed(answer(one, delta("a", index=2**31))))


@pytest.mark.parametrize("status", [status for status in app_pb2.Status.values() if status != app_pb2.STATUS_OK])
def test_every_status_is_an_error_without_the_users_detail(status: app_pb2.Status.ValueType) -> None:
    error = from_done(app_pb2.Done(status=status, detail="private words"))
    assert isinstance(error, TieError)
    assert str(error)
    assert "private" not in str(error)
    assert "private" not in repr(error)


def test_kinds_of_errors() -> None:
    kinds = {
        app_pb2.STATUS_BUSY: NodeBusyError,
        app_pb2.STATUS_UNKNOWN_MODEL: RequestRefusedError,
        app_pb2.STATUS_RUNTIME_UNAVAILABLE: NodeFailedError,
        app_pb2.STATUS_REPLACED: NodeFailedError,
        app_pb2.STATUS_DEADLINE_EXCEEDED: PeerTimeoutError,
    }
    for status, kind in kinds.items():
        assert type(from_done(app_pb2.Done(status=status))) is kind
    assert from_done(app_pb2.Done(status=app_pb2.STATUS_OK)) is None


@given(st.one_of(st.binary(max_size=60), st.text(max_size=20).map(lambda code: json.dumps({"error": code}).encode())))
def test_any_reply_is_an_error(body: bytes) -> None:
    assert isinstance(reply_error(body), TieError)
