"""What the wire between a device and the ingress says of an answer, with and without tick and padding.

    python tests/bench/bench_traffic.py [--exchanges 300] [--tokens 64] [--paces 50 500] [--buckets 64,1024] [--node]

Answers of as many tokens each, half of them of the vocabulary's shortest tokens and half of long ones, come from the
engine, 16 streams at once. Each of them is then sent with and without tick and padding (`traffic_wire`), its times
stretched alike for all so that the median answer has the wanted pace: a small machine's, a large one's. A classifier
(`traffic_trees`) learns from half of the exchanges which kind is which, and is asked about the other half: from the
frames' sizes alone, from their number alone, from their times alone, and from all of it. 0.5 is guessing. The controls
say that it could learn: without padding it should know the kinds by their sizes, and answers that are a tenth longer or
slower by number or time.

With --node the same kinds go through a whole node of its own with its defaults, each answer through processes of its
own, and what is watched is the TCP connection.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import traffic_node
from engine_target import Sink, running, template
from traffic_trees import Area, Labels, Values, separation
from traffic_wire import Exchange, Recording, send

from tie.assets.bundle import open_bundle
from tie.assets.chat import ChatMessage
from tie.assets.tokenizer import Tokenizer, load_tokenizer
from tie.cli.assets import demo_bundle
from tie.cli.settings import cache_dir
from tie.daemon.config import AppConfig
from tie.proto import runtime_pb2
from tie.runtime.engine import Engine
from tie.runtime.request import check

STREAMS = 16
KIND_TOKENS = 500
SHORT_BYTES = range(1, 3)
LONG_BYTES = range(9, 14)
PROMPT = "Write something."
PHASE_S = 0.03  # the app's clock has been ticking for a while when the first token comes


def kinds(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of short tokens and of long ones: plain text, as many of both."""
    found: tuple[list[int], list[int]] = ([], [])
    for id_ in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(id_)
        if id_ not in tokenizer.control_tokens.values() and text.isascii() and text.decode("ascii").isprintable():
            for ids, lengths in zip(found, (SHORT_BYTES, LONG_BYTES), strict=True):
                if len(text) in lengths:
                    ids.append(id_)
    return found[0][:KIND_TOKENS], found[1][:KIND_TOKENS]


async def record(engine: Engine, requests: Sequence[tuple[bool, runtime_pb2.GenerateRequest]]) -> list[Recording]:
    """Answers to all of them, `STREAMS` at a time."""
    waiting, recordings = iter(requests), []

    async def stream() -> None:
        for long, request in waiting:
            sink = Sink()
            engine.submit(check(request, engine.bounds), sink)
            await sink.over.wait()
            first = sink.events[0][0]
            recordings.append(Recording(long, tuple((at - first, event) for at, event in sink.events)))

    await asyncio.gather(*(stream() for _ in range(STREAMS)))
    return recordings


def recorded(
    bundle: Path, exchanges: int, tokens: int, overrides: Sequence[str]
) -> tuple[list[Recording], Tokenizer, AppConfig]:
    """So many answers of each kind, the tokenizer of the model that gave them, and what an app there would be told."""
    dice = random.Random(0)  # noqa: S311 (no secret)
    with running(bundle, ["runtime.threads=1", *overrides]) as (service, config):
        tokenizer = load_tokenizer(open_bundle(bundle))
        prompt = template(config).encode([ChatMessage(role="user", content=PROMPT)])
        asked = []
        for long, ids in enumerate(kinds(tokenizer)):
            for seed in range(exchanges):
                sampling = runtime_pb2.Sampling(temperature=1, seed=seed, allowed_token_ids=ids)
                request = runtime_pb2.GenerateRequest(
                    token_ids=prompt, sampling=sampling, max_tokens=tokens, ignore_eos=True
                )
                asked.append((bool(long), request))
        dice.shuffle(asked)
        return asyncio.run(record(service.engine, asked)), tokenizer, config.app


async def sent(
    recordings: Sequence[Recording],
    config: AppConfig,
    pace: float,
    tokenizer: Tokenizer,
    at_once: int,
    *,
    padded: bool = True,
) -> list[Exchange]:
    """All of them, some at a time, in a random order: the answers of both kinds meet the same machine."""
    dice = random.Random(1)  # noqa: S311 (no secret)
    order = list(recordings)
    dice.shuffle(order)
    waiting, exchanges = iter(order), []

    async def stream() -> None:
        for recording in waiting:
            phase = dice.uniform(0, PHASE_S)
            exchanges.append(await send(recording, config, pace, phase, tokenizer, padded=padded))

    await asyncio.gather(*(stream() for _ in range(at_once)))
    return exchanges


# --- what a classifier is shown of an exchange ---


def _spread(values: Values) -> list[float]:
    return [values.mean(), values.std(), *np.quantile(values, np.linspace(0, 1, 11))]


def sizes(exchange: Exchange) -> list[float]:
    """How large frames are, whatever their number."""
    values = np.array([size for _, size in exchange.frames], float)
    shares, _ = np.histogram(np.log2(values), bins=np.arange(4, 15, 0.25))
    return [*_spread(values), *(shares / len(values)), *(values[:3] if len(values) > 2 else [0] * 3)]


def count(exchange: Exchange) -> list[float]:
    """How many frames there are."""
    return [len(exchange.frames)]


def times(exchange: Exchange) -> list[float]:
    """When frames come, but not how many."""
    values = np.array([at for at, _ in exchange.frames])
    gaps = np.diff(values) if len(values) > 1 else np.zeros(1)
    return [*_spread(gaps), values[-1] - values[0], gaps[0], gaps[-1]]


def everything(exchange: Exchange) -> list[float]:
    """All of it, and how many bytes there are in all."""
    total = float(sum(size for _, size in exchange.frames))
    return [total, *sizes(exchange), *count(exchange), *times(exchange)]


VIEWS: tuple[Callable[[Exchange], list[float]], ...] = (sizes, count, times, everything)


def judged(exchanges: Sequence[Exchange], views: Sequence[Callable[[Exchange], list[float]]] = VIEWS) -> list[Area]:
    """How well each view tells the kinds apart."""
    labels: Labels = np.array([exchange.long for exchange in exchanges])
    return [separation(np.array([view(exchange) for exchange in exchanges]), labels) for view in views]


def controls(exchanges: Sequence[Exchange]) -> list[Area]:
    """Whether number and times of frames are told apart where they differ by a tenth. The rest is left as it is."""
    longer, slower = [], []
    for place, exchange in enumerate(exchanges):
        frames, other = exchange.frames, bool(place % 2)
        more = len(frames) // 10 if other else 0
        longer.append(replace(exchange, long=other, frames=[*frames, *frames[:more]]))
        factor = 1.1 if other else 1.0
        slower.append(replace(exchange, long=other, frames=[(at * factor, size) for at, size in frames]))
    return [*judged(longer, [count]), *judged(slower, [times])]


# --- the report ---

HEADING = f"{'pace':>4} {'tick':>5} {'padding':7}" + "".join(f" {view.__name__:>19}" for view in VIEWS)
COSTS = f" {'bytes':>7} {'of text':>8} {'first':>9} {'last':>9}"


def line(label: str, exchanges: Sequence[Exchange]) -> str:
    """The areas; bytes of an answer, and as a multiple of its text (both kinds); how late its ends come."""
    total = statistics.mean(sum(size for _, size in exchange.frames) for exchange in exchanges)
    multiples = [
        statistics.mean(sum(s for _, s in e.frames) / e.text_bytes for e in exchanges if e.long is long)
        for long in (False, True)
    ]
    delays = [
        1e3 * statistics.mean(getattr(exchange, name) for exchange in exchanges)
        for name in ("first_delay_s", "last_delay_s")
    ]
    areas = "".join(f" {area!s:>19}" for area in judged(exchanges))
    return (
        f"{label}{areas} {total:7.0f} {multiples[0]:3.0f}/{multiples[1]:2.1f} x {delays[0]:6.1f} ms {delays[1]:6.1f} ms"
    )


def measure(options: argparse.Namespace) -> None:
    """Records, sends all of it under each combination, prints what it shows."""
    bundle = options.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    began = time.monotonic()
    recordings, tokenizer, usual = recorded(bundle, options.exchanges, options.tokens, options.overrides)
    spans = [recording.events[-1][0] for recording in recordings]
    own = options.tokens / statistics.median(spans)
    print(f"{len(recordings)} answers of {options.tokens} tokens, {own:.0f} tokens/s each; sizes {usual.buckets}")
    print(f"recorded in {time.monotonic() - began:.0f} s; area under the curve, and its 95 % interval")
    print(HEADING + COSTS)
    for pace in options.paces:
        at_once = max(2, round(options.rate / pace))
        for tick in (0.0, usual.tick_s):
            for padding, buckets in (("off", usual.buckets), ("on", usual.buckets), *(options.buckets if tick else ())):
                config = msgspec.structs.replace(usual, buckets=buckets, tick_s=tick)
                padded = padding != "off"
                exchanges = asyncio.run(sent(recordings, config, pace / own, tokenizer, at_once, padded=padded))
                print(line(f"{pace:4.0f} {tick * 1e3:2.0f} ms {padding:7}", exchanges), flush=True)
                if tick and padding == "on":
                    areas = controls(exchanges)
                    print(f"     controls: a tenth more frames {areas[0]}, a tenth slower {areas[1]}", flush=True)


def sizes_of(text: str) -> tuple[str, tuple[int, ...]]:
    """Sizes beside the default's, and their name in the table."""
    return text.split(",", 1)[0], tuple(int(size) for size in text.split(","))


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="model bundle [default: the demo model's]")
    parser.add_argument("--exchanges", type=int, default=300, help="of each kind")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--paces", type=float, nargs="+", default=[50, 500], help="tokens a second of an answer")
    parser.add_argument("--rate", type=int, default=1500, help="tokens a second of all answers at once")
    parser.add_argument(
        "--buckets", type=sizes_of, action="append", default=[], metavar="N,N…", help="other sizes than the default's"
    )
    parser.add_argument("--node", action="store_true", help="through a whole node")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.node:
        exchanges = traffic_node.watched(kinds, options)
        print(f"{len(exchanges)} answers of {options.tokens} tokens through a node; each TCP segment counts as a frame")
        print(HEADING)
        print(f"{'':18}" + "".join(f" {area!s:>19}" for area in judged(exchanges)))
    else:
        measure(options)


if __name__ == "__main__":
    main()
