"""A closed loop of requests: so many streams at once, each asking again as soon as its answer has ended."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tie.cli.bench_prompts import Prompt
from tie.daemon.errors import RefusedError, TieError
from tie.device.errors import NodeBusyError

Kind = Literal["ok", "busy", "refused", "failed", "interrupted"]
_BUSY_PAUSE_S = 0.1  # a node that says "busy" should not be asked in a tight loop


@dataclass(frozen=True)
class Call:
    """One request as a target sends it."""

    prompt: Prompt
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    timeout_s: float


@dataclass(frozen=True)
class Usage:
    """Tokens as the other side counted them."""

    prompt_tokens: int
    completion_tokens: int


# Called for every piece of an answer with its time on the monotonic clock and its tokens (0 where that is not known).
Heard = Callable[[float, int], None]


class Target(Protocol):
    """Whom to ask."""

    async def ask(self, call: Call, heard: Heard) -> Usage:
        """Asks and reads the answer to its end.

        Raises:
            TieError: NodeBusyError and other RefusedErrors are counted apart.
        """


@dataclass
class Sample:
    """What became of one request. Times are on the monotonic clock, seconds.

    Attributes:
        begun: when it was asked.
        ended: when it was over.
        pieces: when each piece of the answer came, and how many tokens it brought (shared out evenly where the answer
            does not say).
        error: the type, and status, of what went wrong.
    """

    begun: float
    kind: Kind = "interrupted"
    ended: float = 0.0
    pieces: list[tuple[float, float]] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    @property
    def first_s(self) -> float:
        """Seconds to the first piece."""
        return (self.pieces[0][0] if self.pieces else self.ended) - self.begun

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Between neighbouring pieces: seconds, and tokens that came after them."""
        return [(at - before, tokens) for (before, _), (at, tokens) in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass
class Run:
    """All requests at one level of concurrency.

    Attributes:
        samples: in the order in which they began; grows while the run goes on.
        exhausted: when the first stream found nothing more to ask.
    """

    concurrency: int
    begun: float
    samples: list[Sample] = field(default_factory=list)
    exhausted: float | None = None
    ended: float = 0.0
    interrupted: bool = False

    @property
    def tokens(self) -> float:
        """Tokens that have come so far, as far as known before an answer's end."""
        return sum(sample.completion_tokens or sum(tokens for _, tokens in sample.pieces) for sample in self.samples)


@dataclass(frozen=True)
class Load:
    """What to ask for at a level.

    Attributes:
        requests: how many in all; None for as many as fit in `duration_s`.
        duration_s: no request begins later than this; None for no bound.
        Others: as in `Call`.
    """

    requests: int | None
    duration_s: float | None
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    timeout_s: float = 600.0


async def run(target: Target, prompts: Iterator[Prompt], load: Load, run: Run, stopping: asyncio.Event) -> None:
    """Puts the load on the target until it is done or `stopping` is set; everything seen goes into `run`."""
    calls = _calls(prompts, load, run.begun)
    streams = [asyncio.create_task(_stream(target, calls, run)) for _ in range(run.concurrency)]
    stopped = asyncio.create_task(stopping.wait())
    try:
        waiting: set[asyncio.Future[Any]] = {*streams, stopped}
        while waiting > {stopped} and not stopped.done():
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        run.interrupted = stopping.is_set()
        for task in (stopped, *streams):
            task.cancel()
        outcomes = await asyncio.gather(stopped, *streams, return_exceptions=True)
        run.ended = time.monotonic()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome  # a bug of this program: errors of the other side are in the samples


def _calls(prompts: Iterator[Prompt], load: Load, begun: float) -> Iterator[Call]:
    number = 0
    while (load.requests is None or number < load.requests) and (
        load.duration_s is None or time.monotonic() - begun < load.duration_s
    ):
        prompt = next(prompts)
        yield Call(
            prompt=prompt,
            max_tokens=prompt.max_tokens or load.max_tokens,
            temperature=load.temperature,
            seed=load.seed + number,
            ignore_eos=load.ignore_eos,
            timeout_s=load.timeout_s,
        )
        number += 1


async def _stream(target: Target, calls: Iterator[Call], run: Run) -> None:
    for call in calls:
        sample = Sample(begun=time.monotonic())
        run.samples.append(sample)
        await _one(target, call, sample)
        if sample.kind == "busy":
            await asyncio.sleep(_BUSY_PAUSE_S)
    run.exhausted = run.exhausted or time.monotonic()


async def _one(target: Target, call: Call, sample: Sample) -> None:
    try:
        async with asyncio.timeout(call.timeout_s):
            usage = await target.ask(call, lambda at, tokens: sample.pieces.append((at, tokens)))
        sample.kind = "ok"
        sample.prompt_tokens, sample.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        _share_out(sample)
    except TimeoutError:
        sample.kind, sample.error = "failed", "no end within the time limit"
    except TieError as error:
        sample.kind = _kind(error)
        status = str(getattr(error, "status", "") or getattr(error, "code", ""))
        sample.error = f"{type(error).__name__} {status}".strip()
    finally:
        sample.ended = time.monotonic()


def _share_out(sample: Sample) -> None:
    """Through the app a piece is text: its tokens are the answer's, shared out evenly."""
    if sample.pieces and not any(tokens for _, tokens in sample.pieces):
        each = sample.completion_tokens / len(sample.pieces)
        sample.pieces = [(at, each) for at, _ in sample.pieces]


def _kind(error: TieError) -> Kind:
    if isinstance(error, NodeBusyError):
        return "busy"
    return "refused" if isinstance(error, RefusedError) else "failed"
