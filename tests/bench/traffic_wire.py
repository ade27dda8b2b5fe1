"""Answers as they were generated, sent once more through all that shapes what the wire shows of them.

The app's own text, sender, tick and padding, a real socket, the job helper's own reading and sealing, another socket:
only processes are left out, because a thousand exchanges would mostly measure their start.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tie.app.inference import Generation
from tie.app.racing import unless
from tie.app.sender import Sender
from tie.assets.tokenizer import Tokenizer
from tie.cloudboard.relay import Answer, Link, read_app
from tie.daemon.config import AppConfig
from tie.daemon.frames import PREFIX, read_message
from tie.envelope.secret import Secret
from tie.envelope.stream import Direction, Opener, Sealer, unpack_segment
from tie.proto import app_pb2, envelope_pb2, runtime_pb2

LIMIT_S = 60.0
_KEY = bytes(32)
_SALT = bytes(32)

Buckets = Sequence[int]


@dataclass(frozen=True)
class Recording:
    """One answer as the engine gave it.

    Attributes:
        long: which kind it is of.
        events: with the time of each, in seconds from the first.
    """

    long: bool
    events: tuple[tuple[float, runtime_pb2.GenerateEvent], ...]


@dataclass
class Exchange:
    """What was seen of an answer.

    Attributes:
        long: which kind it is of.
        text_bytes: what it said.
        first_delay_s: from the engine's first token to the first frame.
        last_delay_s: from its last event to the last frame.
        frames: time (seconds) and size (bytes) of each, as whoever watches the connection sees them.
    """

    long: bool
    text_bytes: int = 0
    first_delay_s: float = 0.0
    last_delay_s: float = 0.0
    frames: list[tuple[float, int]] = field(default_factory=list)


class Player:
    """In the place of the runtime's client: a recording's events, each when it came.

    Attributes:
        times: of what it has given, by the event loop's clock.

    Args:
        recording: what to play.
        pace: how many times as fast.
    """

    def __init__(self, recording: Recording, pace: float) -> None:
        self.times: list[float] = []
        self._recording = recording
        self._pace = pace

    async def generate(
        self, request: runtime_pb2.GenerateRequest, *, timeout: float
    ) -> AsyncIterator[runtime_pb2.GenerateEvent]:
        """See `tie.daemon.triton.TritonClient.generate`."""
        del request, timeout
        clock = asyncio.get_running_loop().time
        start = clock()
        for at, event in self._recording.events:
            await asyncio.sleep(max(0.0, start + at / self._pace - clock()))
            self.times.append(clock())
            yield event


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[tuple[asyncio.StreamReader, asyncio.StreamWriter], ...]]:
    """Both ends of a socket."""
    ends = [await asyncio.open_unix_connection(sock=end) for end in socket.socketpair()]
    try:
        yield tuple(ends)
    finally:
        for _, writer in ends:
            writer.transport.abort()


async def send(
    recording: Recording, config: AppConfig, pace: float, phase_s: float, tokenizer: Tokenizer, *, padded: bool = True
) -> Exchange:
    """One answer on its whole way.

    Args:
        recording: the answer.
        config: tick and sizes; they need not be such as a node takes.
        pace: how many times as fast as the engine gave it.
        phase_s: how long the app, whose clock ticks from its start, has waited for the first token.
        tokenizer: the model's.
        padded: else frames count as large as they were without their padding.
    """
    seen, player = Exchange(recording.long), Player(recording, pace)
    async with connection() as (app, job), connection() as (out, wire), asyncio.timeout(LIMIT_S):
        sender = Sender(app[1], config)
        await sender.ready()
        await read_app(config, Link(*job), LIMIT_S)
        await asyncio.sleep(phase_s)
        await asyncio.gather(
            _answer(player, sender, tokenizer), _seal(config, Link(*job), Link(*out)), _watch(wire[0], seen, padded)
        )
    seen.first_delay_s = seen.frames[0][0] - player.times[0]
    seen.last_delay_s = seen.frames[-1][0] - player.times[-1]
    return seen


async def _answer(player: Player, sender: Sender, tokenizer: Tokenizer) -> None:
    """As `tie.app.session` does it."""
    generation = Generation(runtime_pb2.GenerateRequest(n=1), tokenizer, sender)
    outcome = await unless(generation.run(player, timeout=LIMIT_S), sender.run())  # type: ignore[arg-type]
    assert outcome.status == app_pb2.STATUS_OK
    await sender.done(outcome)


async def _seal(config: AppConfig, app: Link, ingress: Link) -> None:
    """As `tie.cloudboard.relay` does it."""
    answer = Answer(ingress, Sealer(Secret(_KEY), Direction.RESPONSE), _SALT)
    kind = ""
    while kind != "done":
        kind, payload = await read_app(config, app, LIMIT_S)
        await answer.send(payload, last=kind == "done")


async def _watch(reader: asyncio.StreamReader, seen: Exchange, padded: bool) -> None:
    """What the ingress passes on: it writes each frame as it comes. The text is what the device makes of it."""
    clock, opener = asyncio.get_running_loop().time, Opener(Secret(_KEY), Direction.RESPONSE)
    while not opener.ended:
        message = await read_message(
            reader, envelope_pb2.JobOut, limit=Direction.RESPONSE.max_frame_bytes, timeout=LIMIT_S
        )
        assert message is not None
        if message.HasField("segment"):
            now, size = clock(), PREFIX.size + len(message.segment)
            ciphertext, last = unpack_segment(message.segment)
            plain = app_pb2.AppOut.FromString(opener.open(ciphertext, last=last))
            whole = plain.ByteSize()
            plain.ClearField("padding")
            seen.frames.append((now, size if padded else size - whole + plain.ByteSize()))
            seen.text_bytes += len(plain.delta.text.encode())
