"""What a fuzzer does to what is sealed: segments, a request's key, a node's statement, and an answer's plaintext."""

import contextlib
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tie.daemon.errors import TieError
from tie.device.session import Session
from tie.envelope import sealing, statement, stream
from tie.envelope.errors import EnvelopeError
from tie.envelope.frames import frame
from tie.envelope.secret import Secret
from tie.proto import app_pb2, kps_pb2, request_pb2

_NODE: Final = "node-0"
_SALT: Final = bytes(range(32))
_PRIVATE: Final = sealing.PrivateKey.from_raw(bytes(range(96)))
_KEY: Final = statement.NodeKey(_NODE, _PRIVATE.public, 1 << 40)
_DEK: Final = bytes(32)
_SEALED: Final = sealing.seal_dek(Secret(_DEK), _NODE, _PRIVATE.public)
_SIGNER: Final = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_PINNED: Final = _SIGNER.public_key().public_bytes_raw()
_NOW: Final = 1_000_000
STATEMENT: Final = statement.sign(_SIGNER, _NODE, _PRIVATE.public, not_before=_NOW - 9, not_after=_NOW + 9)
_PLAIN: Final = (b"one", b"", b"three" * 9)


def _segments() -> list[bytes]:
    sealer = stream.Sealer(Secret(_DEK), stream.Direction.RESPONSE)
    return [sealer.seal(plain, last=number == 2) for number, plain in enumerate(_PLAIN)]


_SEGMENTS: Final = _segments()


def envelope(data: bytes) -> None:
    """The lowest bits of byte 0 say what the rest is.

    0: segments in the order of the input's choosing, patched where it likes; 1: patches of a sealed key; 2: fields of a
    statement, signed by the right key (bit 2) or by none; 3: what a hostile node that has the keys seals for a device.
    """
    if len(data) < 2:
        return
    match data[0] & 3:
        case 0:
            _stream(data[1:])
        case 1:
            _key(data[1:])
        case 2:
            _statement(data[1:], signed=bool(data[0] & 4))
        case _:
            _answer(data[1:])


def _patched(genuine: bytes, patches: bytes) -> bytes:
    """Patches of three bytes: two say where, one what."""
    made = bytearray(genuine)
    for at in range(0, len(patches) - 2, 3):
        made[int.from_bytes(patches[at : at + 2], "little") % len(made)] ^= patches[at + 2]
    return bytes(made)


def _stream(moves: bytes) -> None:
    """Moves of four bytes: which segment, whether it is said to be the last, and a patch."""
    opener, opened, broken = stream.Opener(Secret(_DEK), stream.Direction.RESPONSE), 0, False
    for at in range(0, len(moves) - 3, 4):
        which, last = moves[at] & 3, bool(moves[at] & 4)
        genuine = _SEGMENTS[which] if which < 3 else b""
        sealed = _patched(genuine, moves[at + 1 : at + 4]) if genuine else moves[at + 1 : at + 4]
        should = not broken and which == opened and sealed == genuine and last == (which == 2)
        try:
            plain = opener.open(sealed, last=last)
        except EnvelopeError:
            assert not should
            broken = True
        else:
            assert should
            assert plain == _PLAIN[which]
            opened += 1
    whole = True
    try:
        opener.finish()
    except EnvelopeError:
        whole = False
    assert whole == (opened == 3)
    assert opener.ended == whole


def _key(patches: bytes) -> None:
    sealed = _patched(_SEALED, patches)[: len(_SEALED) - len(patches) % 3]
    try:
        with sealing.open_dek(sealed, _NODE, _PRIVATE) as dek:
            assert sealed == _SEALED
            assert dek.reveal() == _DEK
    except EnvelopeError:
        assert sealed != _SEALED
    with contextlib.suppress(EnvelopeError):
        sealing.PublicKey(_patched(_PRIVATE.public.raw, patches)).seal(_DEK, b"")


def _statement(fields: bytes, *, signed: bool) -> None:
    said = kps_pb2.KeyStatement()
    said.CopyFrom(STATEMENT)
    try:
        said.MergeFromString(fields)
    except Exception:  # noqa: BLE001 (no protobuf: not what is tried here)
        return
    if signed:
        said.signature = _SIGNER.sign(statement._message(said))
    try:
        key = statement.verify(said, _PINNED, now=_NOW)
    except statement.StatementError:
        assert said != STATEMENT
        return
    assert signed or statement._message(said) == statement._message(STATEMENT)
    assert said.version == 1
    assert said.not_before - 300 <= _NOW < said.not_after == key.not_after
    assert key.public.key_id == said.key_id


def _answer(pieces: bytes) -> None:
    """Pieces that begin with their length; its highest bit says that they are the last."""
    session = Session(_KEY, request_pb2.InferenceRequest(model="m"))
    key = sealing.response_key(session._dek, session._header, _SALT)
    sealer, body, at = stream.Sealer(key, stream.Direction.RESPONSE), bytearray(_SALT), 0
    texts: dict[int, str] = {}
    while at < len(pieces) and not sealer.ended:
        length, last = pieces[at] & 127, pieces[at] > 127
        sealed = sealer.seal(pieces[at + 1 : at + 1 + length], last=last)
        body += frame(stream.pack_segment(sealed, last=last))
        at += 1 + length
    try:
        for delta in session.feed(bytes(body)):
            texts[delta.index] = texts.get(delta.index, "") + delta.text
        result = session.end()
    except TieError:
        assert session.result is None
        session.close()
        return
    assert sealer.ended
    assert all(result.texts[index] == text for index, text in texts.items() if index < len(result.texts))
    assert sum(map(len, result.texts)) <= sum(map(len, texts.values()))


def answer(*messages: app_pb2.AppOut) -> bytes:
    """Pieces for `_answer`."""
    whole = [message.SerializeToString() for message in messages]
    return b"".join(bytes([len(one) | (128 if one is whole[-1] else 0)]) + one for one in whole)
