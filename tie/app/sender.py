"""What the app says to the jobhelper: ready, deltas, one done; each frame padded, on a clock of its own.

Deltas are gathered and leave only at the ticks of a clock that started with the process, so that neither the size nor
the time of a frame follows a token. Of a choice one frame of the smallest size leaves at a tick, and what does not fit
waits for the next, so that where tokens come fast sizes do not tell long ones from short ones either; only what would
wait for long goes in larger frames. A frame that cannot be padded is not sent.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tie.app.outcome import Outcome
from tie.daemon.config import AppConfig
from tie.daemon.frames import write_bytes
from tie.daemon.padding import PaddingError, pad, room
from tie.proto import app_pb2

# Tag and length of `delta` or `done` in AppOut, and of `text` or `detail` in those: lengths up to 3 bytes (1 MiB).
_ENVELOPE_BYTES = 2 * (1 + 3)
_ENTRY_BYTES = 1 + 3  # tag and length of one repeated entry
_WAITING = 4  # frames of the smallest size: more than a reader would notice do not wait


@dataclass
class _Gathered:
    text: list[str] = field(default_factory=list)
    logprobs: list[app_pb2.TokenLogprob] = field(default_factory=list)


class Sender:
    """The app's side of the conversation.

    Args:
        writer: the accepted connection.
        config: buckets, tick, and how long a jobhelper may leave a frame unread.
    """

    def __init__(self, writer: asyncio.StreamWriter, config: AppConfig) -> None:
        self._writer = writer
        self._config = config
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()
        self._gathered: dict[int, _Gathered] = {}
        self._some = asyncio.Event()
        self._ended = False

    async def ready(self) -> None:
        """Says that a request may come."""
        await self._send([app_pb2.AppOut(ready=app_pb2.Ready())])

    def put(self, index: int, text: str, logprobs: Sequence[app_pb2.TokenLogprob] = ()) -> None:
        """Adds to choice `index` what will leave at the next tick."""
        if text or logprobs:
            gathered = self._gathered.setdefault(index, _Gathered())
            gathered.text.append(text)
            gathered.logprobs.extend(logprobs)
            self._some.set()

    async def run(self) -> None:
        """Sends what is gathered at every tick, until cancelled.

        Raises:
            PeerError: the jobhelper is gone or does not read.
            PaddingError: a frame cannot be padded.
        """
        while True:
            await self._some.wait()
            await asyncio.sleep(self._until_tick())
            await self._send(self._due())

    async def done(self, outcome: Outcome) -> None:
        """Sends what is left and the end. Raises as `run`; RuntimeError on a second call, which is a bug."""
        if self._ended:
            raise RuntimeError("done is sent once")
        self._ended = True
        if self._some.is_set():
            await asyncio.sleep(self._until_tick())
        await self._send([*self._due(last=True), app_pb2.AppOut(done=_done(outcome, room(self._config.buckets)))])

    def _until_tick(self) -> float:
        tick = self._config.tick_s
        return tick - (self._clock() - self._start) % tick if tick else 0.0

    def _due(self, *, last: bool = False) -> list[app_pb2.AppOut]:
        """What leaves at this tick: of each choice one small frame, unless it is the `last` tick or too much waits."""
        gathered, self._gathered = self._gathered, {}
        self._some.clear()
        due: list[app_pb2.Delta] = []
        for index, parts in sorted(gathered.items()):
            text = "".join(parts.text)
            small = list(deltas(index, text, parts.logprobs, room(self._config.buckets[:1])))
            if len(small) > _WAITING:
                due.extend(deltas(index, text, parts.logprobs, room(self._config.buckets)))
            elif last:
                due.extend(small)
            else:
                due.append(small[0])
                for waiting in small[1:]:
                    self.put(index, waiting.text, waiting.logprobs)
        return [app_pb2.AppOut(delta=delta) for delta in due]

    async def _send(self, frames: Sequence[app_pb2.AppOut]) -> None:
        payloads = [pad(frame, self._config.buckets) for frame in frames]
        await write_bytes(self._writer, *payloads, timeout=self._config.idle_timeout_s)


def deltas(index: int, text: str, logprobs: Sequence[app_pb2.TokenLogprob], largest: int) -> Iterator[app_pb2.Delta]:
    """Cuts text (between characters) and logprobs into deltas whose frames are at most `largest` bytes unpadded."""
    budget = largest - _ENVELOPE_BYTES - app_pb2.Delta(index=index).ByteSize()
    delta, left = app_pb2.Delta(index=index), budget
    for piece in _pieces(text, budget):
        if delta.text:
            yield delta
            delta = app_pb2.Delta(index=index)
        delta.text, left = piece, budget - len(piece.encode())
    for entry in logprobs:
        cost = _ENTRY_BYTES + entry.ByteSize()
        if cost > left and (delta.text or delta.logprobs):
            yield delta
            delta, left = app_pb2.Delta(index=index), budget
        delta.logprobs.append(entry)
        left -= cost
    if delta.text or delta.logprobs:
        yield delta


def _done(outcome: Outcome, largest: int) -> app_pb2.Done:
    done = app_pb2.Done(status=outcome.status, finish=outcome.finishes, usage=outcome.usage)
    # The detail is a courtesy: it is cut where the status and the counts must go through whole.
    done.detail = next(_pieces(outcome.detail, largest - _ENVELOPE_BYTES - done.ByteSize()), "")
    return done


def _pieces(text: str, size: int) -> Iterator[str]:
    """`text` in pieces of at most `size` bytes of UTF-8, cut between characters."""
    data = text.encode()
    start = 0
    while start < len(data):
        end = min(start + size, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:  # a continuation byte: not a border
            end -= 1
        if end <= start:
            raise PaddingError("no room for a single character")
        yield data[start:end].decode()
        start = end
