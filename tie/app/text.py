"""From token ids to the text that may leave: whole characters, minus what could still become a stop string.

The runtime matches stop strings, because it must stop; it counts in bytes of the same decoded text that is built here,
and says after every token how many bytes at its end to hold back, and at the end how many to drop.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tie.assets.tokenizer import StreamDecoder
from tie.daemon.errors import ProtocolError
from tie.proto import app_pb2


@dataclass
class _Scored:
    """A token's logprob, waiting for its text to leave. `end` is None until a whole character has come of it."""

    start: int
    end: int | None
    logprob: app_pb2.TokenLogprob


class ChoiceText:
    """The text of one choice as it grows. Offsets are bytes of UTF-8 from the start of the choice."""

    def __init__(self, decoder: StreamDecoder) -> None:
        self._decoder = decoder
        self._held = b""  # decoded and not sent
        self._sent = 0
        self._scored: deque[_Scored] = deque()

    @property
    def _decoded(self) -> int:
        return self._sent + len(self._held)

    def add(self, token_id: int, logprob: app_pb2.TokenLogprob | None = None) -> None:
        """Decodes one more token."""
        start = self._decoded
        text = self._decoder.feed(token_id).encode()
        self._held += text
        if logprob is not None:
            self._scored.append(_Scored(start, None, logprob))
        if text:
            self._settle()

    def release(self, hold_bytes: int) -> tuple[str, Sequence[app_pb2.TokenLogprob]]:
        """All but the last `hold_bytes` bytes, with the logprobs of the tokens that are wholly in it.

        Raises:
            ProtocolError: it holds back what was released before.
        """
        keep = len(self._held) - hold_bytes
        if keep < 0:
            raise ProtocolError("the runtime holds back text that was released")
        while 0 < keep < len(self._held) and self._held[keep] & 0xC0 == 0x80:
            keep -= 1  # a hold that begins inside a character holds all of it
        return self._take(keep)

    def finish(self, drop_bytes: int, *, stopped: bool) -> tuple[str, Sequence[app_pb2.TokenLogprob]]:
        """What is left, minus the last `drop_bytes` bytes.

        Args:
            drop_bytes: the matched stop string and what followed it.
            stopped: a stop string matched, so that an unfinished character at the end came after it.

        Raises:
            ProtocolError: it drops what was released before.
        """
        if not stopped:
            self._held += self._decoder.finish().encode()
        keep = len(self._held) - drop_bytes
        if keep < 0:
            raise ProtocolError("the runtime drops text that was released")
        text = self._held[:keep].decode(errors="replace")
        end = self._sent + keep
        scored = [entry.logprob for entry in self._scored if entry.start < end or not drop_bytes]
        self._held = b""
        self._scored.clear()
        self._sent = end
        return text, scored

    def _take(self, keep: int) -> tuple[str, Sequence[app_pb2.TokenLogprob]]:
        text, self._held = self._held[:keep].decode(), self._held[keep:]
        self._sent += keep
        scored = []
        while self._scored and self._scored[0].end is not None and self._scored[0].end <= self._sent:
            scored.append(self._scored.popleft().logprob)
        return text, scored

    def _settle(self) -> None:
        # Tokens that gave no character of their own leave with the next character, not before it.
        for entry in reversed(self._scored):
            if entry.end is not None:
                break
            entry.end = self._decoded
