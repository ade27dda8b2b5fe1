"""Segments: order, completeness, end and every bit are authenticated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.envelope.errors import EnvelopeError, SealUsageError
from tie.envelope.secret import Secret
from tie.envelope.stream import (
    Direction,
    Opener,
    Sealer,
    pack_segment,
    unpack_segment,
)

KEY = bytes(range(32))
texts = st.lists(st.binary(max_size=40), min_size=1, max_size=6)


def seal(pieces: list[bytes], direction: Direction = Direction.REQUEST) -> list[tuple[bytes, bool]]:
    sealer = Sealer(Secret(KEY), direction)
    last = len(pieces) - 1
    return [(sealer.seal(piece, last=number == last), number == last) for number, piece in enumerate(pieces)]


def open_all(segments: list[tuple[bytes, bool]], direction: Direction = Direction.REQUEST) -> list[bytes]:
    opener = Opener(Secret(KEY), direction)
    pieces = [opener.open(ciphertext, last=last) for ciphertext, last in segments]
    opener.finish()
    return pieces


def test_golden_segments() -> None:
    assert [ciphertext.hex() for ciphertext, _ in seal([b"one", b"two"])] == [
        "61d2d09c4924b5e834a8167b4cfbfe7ab2bfb5",
        "61a1d0be98b167b36c77bd5fd2337163767da8",
    ]


@given(texts, st.sampled_from(Direction))
def test_round_trip(pieces: list[bytes], direction: Direction) -> None:
    assert open_all(seal(pieces, direction), direction) == pieces


@given(texts, st.data())
def test_every_change_is_one_and_the_same_error(pieces: list[bytes], data: st.DataObject) -> None:
    segments = seal(pieces)
    kind = data.draw(st.sampled_from(["cut", "drop", "repeat", "swap", "flip", "mark", "shorten", "direction"]))
    index = data.draw(st.integers(0, len(segments) - 1))
    ciphertext, last = segments[index]
    changed = list(segments)
    direction = Direction.REQUEST
    match kind:
        case "cut":
            changed = changed[:index]
        case "drop":
            del changed[index]
        case "repeat":
            changed.insert(index, changed[index])
        case "swap":
            other = data.draw(st.integers(0, len(segments) - 1))
            changed[index], changed[other] = changed[other], changed[index]
            if other == index:
                changed.append(changed[0])
        case "flip":
            bit = data.draw(st.integers(0, len(ciphertext) * 8 - 1))
            flipped = bytearray(ciphertext)
            flipped[bit // 8] ^= 1 << bit % 8
            changed[index] = (bytes(flipped), last)
        case "mark":
            changed[index] = (ciphertext, not last)
        case "shorten":
            changed[index] = (ciphertext[:-1], last)
        case _:
            direction = Direction.RESPONSE
    with pytest.raises(EnvelopeError, match=r"^the sealed data does not verify$"):
        open_all(changed, direction)


@given(st.binary(max_size=64), st.booleans())
def test_any_bytes_are_refused(data: bytes, last: bool) -> None:
    with pytest.raises(EnvelopeError):
        Opener(Secret(KEY), Direction.RESPONSE).open(data, last=last)


def test_nothing_opens_after_a_failure() -> None:
    segments = seal([b"a", b"b"])
    opener = Opener(Secret(KEY), Direction.REQUEST)
    with pytest.raises(EnvelopeError):
        opener.open(*segments[1:][0][:1], last=True)
    with pytest.raises(EnvelopeError):
        opener.open(segments[0][0], last=False)


def test_the_key_is_wiped_and_not_shown() -> None:
    key = Secret(KEY)
    buffer = key.reveal()
    sealer = Sealer(key, Direction.RESPONSE)
    assert buffer == bytes(32)
    assert repr(sealer) == "<Sealer RESPONSE segment=0>"


@pytest.mark.parametrize("direction", Direction)
def test_use_out_of_turn(direction: Direction) -> None:
    sealer = Sealer(Secret(KEY), direction)
    with pytest.raises(SealUsageError):
        sealer.seal(bytes(direction.max_segment_bytes + 1), last=False)
    assert len(sealer.seal(bytes(direction.max_segment_bytes), last=True)) == direction.max_ciphertext_bytes
    assert sealer.ended
    with pytest.raises(SealUsageError):
        sealer.seal(b"", last=True)


@given(st.binary(max_size=30), st.booleans())
def test_packing(ciphertext: bytes, last: bool) -> None:
    assert unpack_segment(pack_segment(ciphertext, last=last)) == (ciphertext, last)


@given(st.binary(max_size=3))
def test_unpacking_any_bytes(data: bytes) -> None:
    if not data or data[0] > 1:
        with pytest.raises(EnvelopeError):
            unpack_segment(data)
    else:
        assert pack_segment(unpack_segment(data)[0], last=unpack_segment(data)[1]) == data
