"""The figures of a run: for people as a table, for programs as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from tie.cli.bench_load import Run


@dataclass(frozen=True)
class Spread:
    """Percentiles of one quantity."""

    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Of measured values; None where there are none."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(p50, p90, p99, sum(ordered) / len(ordered), ordered[-1])


@dataclass(frozen=True)
class Level:
    """One level of concurrency. Times are seconds; spreads are None where nothing was measured.

    Attributes:
        ok: requests answered to the end.
        busy: refused because the node takes no more now.
        refused: refused for what they are.
        failed: lost, late, cut short or not verified.
        interrupted: cut short by the person at the keyboard.
        errors: what went wrong, by type and status.
        tokens_per_s: answers' tokens over the whole time, first request to last end.
        full_tokens_per_s: the same while all streams were busy: from the first text of the last stream to begin until
            the first stream had nothing more to ask. None when that never was.
        first_token_s: from asking to the first text.
        per_token_s: gap between two pieces of an answer, divided by the tokens that the second one brought.
        gap_s: gap between two pieces, as a reader sees it.
        total_s: from asking to the end.
    """

    concurrency: int
    elapsed_s: float
    ok: int
    busy: int
    refused: int
    failed: int
    interrupted: int
    errors: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    requests_per_s: float
    tokens_per_s: float
    full_tokens_per_s: float | None
    first_token_s: Spread | None
    per_token_s: Spread | None
    gap_s: Spread | None
    total_s: Spread | None

    @property
    def unanswered(self) -> int:
        """Requests that were not answered, but for those that the user broke off."""
        return self.busy + self.refused + self.failed


def level(run: Run) -> Level:
    """The figures of a run that has ended."""
    kinds = Counter(sample.kind for sample in run.samples)
    answered = [sample for sample in run.samples if sample.kind == "ok"]
    elapsed = max(run.ended - run.begun, 1e-9)
    tokens = sum(sample.completion_tokens for sample in answered)
    gaps = [gap for sample in answered for gap in sample.gaps]
    return Level(
        concurrency=run.concurrency,
        elapsed_s=elapsed,
        ok=kinds["ok"],
        busy=kinds["busy"],
        refused=kinds["refused"],
        failed=kinds["failed"],
        interrupted=kinds["interrupted"],
        errors=dict(Counter(sample.error for sample in run.samples if sample.error)),
        prompt_tokens=sum(sample.prompt_tokens for sample in answered),
        completion_tokens=tokens,
        requests_per_s=len(answered) / elapsed,
        tokens_per_s=tokens / elapsed,
        full_tokens_per_s=_full(run),
        first_token_s=Spread.of([sample.first_s for sample in answered]),
        per_token_s=Spread.of([seconds / tokens for seconds, tokens in gaps if tokens]),
        gap_s=Spread.of([seconds for seconds, _ in gaps]),
        total_s=Spread.of([sample.ended - sample.begun for sample in answered]),
    )


def _full(run: Run) -> float | None:
    """Tokens a second while every stream was busy."""
    firsts = [sample.pieces[0][0] for sample in run.samples[: run.concurrency] if sample.pieces]
    if len(firsts) < run.concurrency or run.exhausted is None or run.exhausted <= max(firsts):
        return None
    begin, end = max(firsts), run.exhausted
    pieces = (piece for sample in run.samples for piece in sample.pieces)
    return sum(tokens for at, tokens in pieces if begin < at <= end) / (end - begin)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the ascending values lie, interpolated between neighbours."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def table(levels: Sequence[Level]) -> Table:
    """The figures for a person, on 80 columns."""
    caption = "times in ms; not: unanswered; full: tokens/s while all streams were busy"
    grid = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", caption=caption, caption_justify="left")
    for heading in ("streams", "ok", "not", "tokens/s", "full"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for heading in ("first: p50", "p90", "p99", "token: p50", "p90", "p99"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for one in levels:
        grid.add_row(
            str(one.concurrency),
            str(one.ok),
            str(one.unanswered or ""),
            f"{one.tokens_per_s:.1f}",
            "" if one.full_tokens_per_s is None else f"{one.full_tokens_per_s:.1f}",
            *_cells(one.first_token_s),
            *_cells(one.per_token_s),
        )
    return grid


def _cells(spread: Spread | None) -> tuple[str, str, str]:
    if spread is None:
        return "", "", ""
    return _ms(spread.p50), _ms(spread.p90), _ms(spread.p99)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"
