"""One sealed request and its answer, without any input or output: both clients are thin around this."""

from collections.abc import Iterator
from typing import Final

import msgspec

from tie.daemon.errors import ProtocolError, TieError
from tie.daemon.frames import parse
from tie.device import errors
from tie.device.answer import Delta, Result
from tie.envelope import sealing, stream
from tie.envelope.frames import FrameSplitter, frame
from tie.envelope.padding import pad_request
from tie.envelope.secret import Secret
from tie.envelope.statement import NodeKey
from tie.proto import app_pb2, envelope_pb2, request_pb2

SEGMENT_BYTES: Final = 32 * 1024  # of a request's plaintext
_FRAME_LIMIT: Final = stream.Direction.RESPONSE.max_ciphertext_bytes + 1
_MAX_CHOICES: Final = 1024


class Session:
    """Seals one request under a DEK of its own, then opens its answer.

    Attributes:
        body: the HTTP request body.
        result: how the answer ended; None until then.
    """

    def __init__(self, node: NodeKey, request: request_pb2.InferenceRequest) -> None:
        with Secret.random(sealing.DEK_BYTES) as dek:
            self._header = sealing.Header(
                node_id=node.node_id,
                key_id=node.public.key_id,
                sealed_dek=sealing.seal_dek(dek, node.node_id, node.public),
                model=request.model,
            )
            self.body = _seal_body(self._header, dek, request)
            self._dek = Secret(dek.reveal())
        self.result: Result | None = None
        self._salt = bytearray()
        self._splitter = FrameSplitter(_FRAME_LIMIT)
        self._opener: stream.Opener | None = None
        self._texts: dict[int, str] = {}

    def feed(self, data: bytes) -> Iterator[Delta]:
        """Takes bytes of the HTTP response's body, yields the pieces of text that they complete.

        Raises:
            EnvelopeError: the answer does not verify.
            TieError: the answer ended with an error; which one says why (tie.device.errors).
        """
        if self._opener is None:
            missing = sealing.SALT_BYTES - len(self._salt)
            self._salt += data[:missing]
            data = data[missing:]
            if len(self._salt) < sealing.SALT_BYTES:
                return
            key = sealing.response_key(self._dek, self._header, bytes(self._salt))
            self._opener = stream.Opener(key, stream.Direction.RESPONSE)
            self._dek.close()
        for payload in self._splitter.feed(data):
            ciphertext, last = stream.unpack_segment(payload)
            message = parse(self._opener.open(ciphertext, last=last), app_pb2.AppOut)
            kind = message.WhichOneof("kind")
            if last != (kind == "done"):
                raise ProtocolError("the answer's end is not where it is marked")
            if kind == "done":
                self._finish(message.done)
            elif kind == "delta":
                yield self._gather(message.delta)
            else:
                raise ProtocolError("the answer holds something else than text")

    def end(self) -> Result:
        """The HTTP response is over.

        Raises:
            TruncatedError: the answer is not.
        """
        self.close()
        if self.result is None:
            raise errors.TruncatedError("the answer stopped before its end")
        return self.result

    def close(self) -> None:
        """Drops the keys."""
        self._dek.close()
        if self._opener is not None:
            self._opener.close()

    def _gather(self, delta: app_pb2.Delta) -> Delta:
        if delta.index >= _MAX_CHOICES:
            raise ProtocolError("the answer has a choice of an impossible number")
        self._texts[delta.index] = self._texts.get(delta.index, "") + delta.text
        return Delta.of(delta)

    def _finish(self, done: app_pb2.Done) -> None:
        if any(finish.index >= _MAX_CHOICES for finish in done.finish):
            raise ProtocolError("the answer has a choice of an impossible number")
        error = errors.from_done(done)
        if error is not None:
            raise error
        self.result = Result.of(done, self._texts)


def reply_error(body: bytes) -> TieError:
    """The error that the body of an HTTP reply other than 200 stands for."""
    try:
        return errors.from_code(msgspec.json.decode(body, type=_Reply).error)
    except msgspec.MsgspecError:
        return errors.from_code("")


class _Reply(msgspec.Struct):
    error: str


def _seal_body(header: sealing.Header, dek: Secret, request: request_pb2.InferenceRequest) -> bytes:
    sealed_header = envelope_pb2.SealedHeader(
        version=sealing.VERSION,
        node_id=header.node_id,
        key_id=header.key_id,
        sealed_dek=header.sealed_dek,
        model=header.model,
    )
    parts = [frame(envelope_pb2.SealedIn(header=sealed_header).SerializeToString())]
    sealer = stream.Sealer(sealing.request_key(dek, header), stream.Direction.REQUEST)
    plaintext = pad_request(request)
    for start in range(0, len(plaintext), SEGMENT_BYTES):
        last = start + SEGMENT_BYTES >= len(plaintext)
        ciphertext = sealer.seal(plaintext[start : start + SEGMENT_BYTES], last=last)
        segment = envelope_pb2.SealedSegment(ciphertext=ciphertext, last=last)
        parts.append(frame(envelope_pb2.SealedIn(segment=segment).SerializeToString()))
    return b"".join(parts)
