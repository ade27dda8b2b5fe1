"""`tie bench`: how fast a node answers, measured from outside while it serves many at once."""

import asyncio
import dataclasses
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tie import __version__
from tie.cli import asking, bench_load, bench_report, settings
from tie.cli.bench_load import Load, Run, Target
from tie.cli.bench_prompts import Prompt, file_prompts, random_prompts
from tie.cli.bench_report import Level
from tie.cli.exits import exit_code
from tie.cli.main import complain
from tie.daemon.errors import ConfigError, TieError

_REFRESH_S = 0.25
_INTERRUPTED = 130


class _Levels(click.ParamType[tuple[int, ...]]):
    """Levels of concurrency: "1,8,16"."""

    name = "N,N,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdigit() and 1 <= int(part) <= 1024 for part in parts):
            self.fail("is a list of numbers from 1 to 1024, for example 1,8,16", param, ctx)
        return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class Measurement:
    """What to do at each level.

    Attributes:
        load: for the measured requests.
        warm_up: answers per stream that are asked for and not counted.
        prompts: made anew for each level, so that every level asks the same.
    """

    load: Load
    requests_per_stream: int | None
    warm_up: int
    words: int
    file: Path | None

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """Raises ConfigError where the file holds none."""
        return file_prompts(self.file, seed) if self.file else random_prompts(self.words, seed)


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), default=settings.default_run_dir, help="Of a local node.")
@click.option("--url", help="Of the node's ingress [default: the local node's].")
@click.option("--statement-key", type=click.Path(path_type=Path), help="The fleet's statement.pub [default: local].")
@click.option("--model", help="Model id [default: the local node's].")
@click.option(
    "--target",
    "kind",
    type=click.Choice(["node", "triton"]),
    default="node",
    show_default=True,
    help="The whole path, or the engine behind Triton of a node on this machine (as the user that runs it).",
)
@click.option(
    "--concurrency", type=_Levels(), default="1,8,16", show_default=True, help="Streams at once, level by level."
)
@click.option("--requests", type=click.IntRange(1), help="Per level [default: 2 per stream, or as many as fit].")
@click.option("--duration", type=click.FloatRange(0.1), help="Seconds per level after which no request begins.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True, help="About, as random words.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Of each answer.")
@click.option("--prompts", "file", type=click.Path(path_type=Path), help='JSONL: {"prompt": …} or {"messages": …}.')
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--natural-end", is_flag=True, help="Let answers end by themselves, not at --max-tokens.")
@click.option("--warm-up", type=click.IntRange(0), default=1, show_default=True, help="Uncounted requests per stream.")
@click.option("--timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds for one answer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and sampling.")
@click.option(
    "--json", "report", type=click.Path(allow_dash=True), help="Write the report there; - for standard output."
)
def bench(
    *,
    run_dir: Path,
    url: str | None,
    statement_key: Path | None,
    model: str | None,
    kind: str,
    concurrency: tuple[int, ...],
    requests: int | None,
    duration: float | None,
    prompt_tokens: int,
    max_tokens: int,
    file: Path | None,
    temperature: float,
    natural_end: bool,
    warm_up: int,
    timeout: float,
    seed: int,
    report: str | None,
) -> int:
    """Measure throughput and latency of a running node.

    A level is a closed loop: so many streams, each asking again as soon as its answer has ended. "tokens/s" is the
    answers' tokens, as the node counts them, over the whole level; "full" the same while all streams were busy.
    "first text" is the time from asking to the first text, connection and sealing included.

    "per token" is the gap between two pieces of an answer divided by the tokens that the second one brought. The node
    gathers text on a clock, so a piece holds several tokens, and through the app their number is the answer's mean per
    piece: the figure is the pace of an answer, and no single token's delay. (The JSON report has the plain gaps too.)

    Ctrl-C ends a run early, with the figures so far. Exit codes: 0 every request was answered, 1 not every one, 130
    interrupted, and those that `tie --help` lists when there is nothing to measure.
    """
    measurement = Measurement(
        load=Load(requests, duration, max_tokens, temperature, seed, ignore_eos=not natural_end, timeout_s=timeout),
        requests_per_stream=2 if requests is None and duration is None else None,
        warm_up=warm_up,
        words=prompt_tokens,
        file=file,
    )
    try:
        measurement.prompts(seed)
        target = _target(kind, run_dir, url, statement_key, model)
        levels, interrupted = asyncio.run(_measure(target, measurement, concurrency))
    except TieError as error:
        complain(error)
        return exit_code(error)
    options = {"target": kind, "prompt_tokens": prompt_tokens, "prompts": str(file) if file else None}
    told = {
        "version": __version__,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "options": options | dataclasses.asdict(measurement.load) | {"warm_up": warm_up},
        "interrupted": interrupted,
        "levels": [dataclasses.asdict(one) for one in levels],
    }
    _tell(levels, json.dumps(told, indent=2), report)
    if interrupted:
        return _INTERRUPTED
    return 1 if any(one.unanswered for one in levels) else 0


def _target(
    kind: str, run_dir: Path, url: str | None, statement_key: Path | None, model: str | None
) -> AbstractAsyncContextManager[Target]:
    if kind == "node":
        from tie.cli.bench_targets import node

        return node(asking.target(run_dir, url, statement_key, model))
    if url or statement_key or model:
        raise ConfigError("--target triton measures the node in --run-dir", hint="leave --url and the like away")
    from tie.cli.bench_triton import triton  # the node's packages, which a device does not have

    return triton(run_dir)


def _tell(levels: Sequence[Level], report: str, where: str | None) -> None:
    if where == "-":
        click.echo(report)
        return
    console = Console(highlight=False)
    console.print(bench_report.table(levels))
    for one in levels:
        for error, count in one.errors.items():
            console.print(f"{one.concurrency} streams: {error}, {count} times", style="red")
    if where:
        try:
            Path(where).write_text(report + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {where}: {error.strerror}") from error


async def _measure(
    opening: AbstractAsyncContextManager[Target], measurement: Measurement, concurrency: Sequence[int]
) -> tuple[list[Level], bool]:
    """All levels, one after the other; and whether the user broke off."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stopping.set)
    levels: list[Level] = []
    async with opening as target:
        for streams in concurrency:
            if stopping.is_set():
                break
            levels.append(await measure(target, measurement, streams, stopping))
    return levels, stopping.is_set()


async def measure(target: Target, measurement: Measurement, streams: int, stopping: asyncio.Event) -> Level:
    """One level: first without counting, then with. Shows its progress on standard error."""
    seed, load = measurement.load.seed, measurement.load
    if measurement.warm_up:
        warm_up = dataclasses.replace(load, requests=measurement.warm_up * streams, duration_s=None)
        async with _shown("warming up", streams, warm_up) as run:
            await bench_load.run(target, measurement.prompts(seed + 1), warm_up, run, stopping)
    if measurement.requests_per_stream is not None:
        load = dataclasses.replace(load, requests=measurement.requests_per_stream * streams)
    async with _shown(f"{streams} stream{'s' * (streams > 1)}", streams, load) as run:
        await bench_load.run(target, measurement.prompts(seed), load, run, stopping)
    return bench_report.level(run)


@asynccontextmanager
async def _shown(title: str, streams: int, load: Load) -> AsyncIterator[Run]:
    """A new run whose progress is on standard error while the block runs; nothing where there is no terminal."""
    run = Run(streams, time.monotonic())
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(title, total=load.requests or load.duration_s, state="")

        async def refresh() -> None:
            while True:
                over = sum(sample.ended > 0 for sample in run.samples)
                wrong = sum(sample.kind in {"busy", "refused", "failed"} for sample in run.samples)
                elapsed = time.monotonic() - run.begun
                state = f"{over} answers, {len(run.samples) - over} running, {run.tokens / elapsed:.0f} tokens/s"
                state += f", {wrong} not answered" if wrong else ""
                progress.update(task, completed=over if load.requests else elapsed, state=state)
                await asyncio.sleep(_REFRESH_S)

        refreshing = asyncio.create_task(refresh())
        try:
            yield run
        finally:
            refreshing.cancel()
            await asyncio.gather(refreshing, return_exceptions=True)
