"""What a cached conversation saves, and what restoring it costs others, on a node of its own.

    python tests/bench/bench_turns.py [--tokens 2048 4096] [--repeats 5] [--set runtime.executor=native]

For each length a conversation gets a first turn of about so many tokens. Then it is asked one question after another,
in turn with its key, so that the turn is restored, and without, so that it is computed afresh; all else is equal. The
same pairs once more beside an answer that streams all the time: how long do its pieces stay away?
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import time
from pathlib import Path

from tie.assets.bundle import open_bundle
from tie.cli.assets import demo_bundle
from tie.cli.local_node import LocalNode
from tie.cli.settings import cache_dir
from tie.device.async_client import AsyncClient
from tie.device.conversations import Conversation
from tie.proto import control_pb2

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from node_log import SAVED, logged

START_S = 180.0
SETTLE_S = 0.5  # a fresh app takes the place of the one that has served
WORDS = (
    "river",
    "stone",
    "north",
    "garden",
    "window",
    "silver",
    "letter",
    "winter",
    "harbour",
    "bridge",
    "music",
    "salt",
)


class Bench:
    """A node, a device, and the questions that it asks."""

    def __init__(self, node: LocalNode, client: AsyncClient, model: str) -> None:
        self._node, self._client, self._model = node, client, model
        self._chance = random.Random(3)  # noqa: S311 (filler)

    def text(self, words: int) -> str:
        return " ".join(self._chance.choice(WORDS) for _ in range(words))

    async def turn(self, conversation: Conversation, question: str, *, max_tokens: int) -> tuple[float, object]:
        """Seconds to the first text, and the whole answer; with a key, once the node has saved it."""
        async with logged(self._node, SAVED, times=1 if conversation.options else 0):
            began = time.perf_counter()
            answer = await self._client.chat(
                conversation.asking(question),
                model=self._model,
                temperature=0.0,
                max_tokens=max_tokens,
                ignore_eos=True,
                **conversation.options,
            )
            pieces = aiter(answer)
            await anext(pieces, None)
            first = time.perf_counter() - began
            result = await answer.result()
        await asyncio.sleep(SETTLE_S)
        return first, result

    @contextlib.asynccontextmanager
    async def streaming(self):
        """An answer without end; when its pieces came."""
        times: list[float] = []

        async def stream() -> None:
            while True:
                answer = await self._client.chat(
                    [{"role": "user", "content": "Tell a long story."}],
                    model=self._model,
                    max_tokens=4000,
                    ignore_eos=True,
                )
                async for _ in answer:
                    times.append(time.perf_counter())  # noqa: PERF401 (as each comes)

        task = asyncio.create_task(stream())
        try:
            while len(times) < 20:
                await asyncio.sleep(0.1)
            yield times
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def pairs(self, tokens: int, repeats: int, times: list[float] | None = None) -> None:
        conversation = Conversation([{"role": "system", "content": "You answer in few words."}])
        question = f"Remember this: {self.text(tokens * 9 // 10)}."
        _, result = await self.turn(conversation, question, max_tokens=8)
        conversation.answered(question, result.text)
        plain = Conversation(conversation.messages, reusable=False)
        restored, fresh, gaps = [], [], {"restored": [], "afresh": []}
        for _ in range(repeats):
            question = f"What goes with {self.text(3)}?"
            for name, asked, seconds in (("restored", conversation, restored), ("afresh", plain, fresh)):
                began = time.perf_counter()
                first, result = await self.turn(asked, question, max_tokens=8)
                seconds.append(first)
                cached = result.cached_tokens
                assert bool(cached) == bool(asked.options), cached
                prompt = result.prompt_tokens
                during = [when for when in times or () if began - 0.2 <= when <= began + first + 0.2]
                gaps[name] += [max((b - a for a, b in itertools.pairwise(during)), default=0.0)]
                if name == "restored":
                    reused = cached
        ratios = [one / other for one, other in zip(restored, fresh, strict=True)]
        print(
            f"{prompt} tokens, {reused} of them cached{', beside a stream' if times else ''}: first text restored "
            f"{_spread(restored, 1e3)} ms, afresh {_spread(fresh, 1e3)} ms; ratio {_spread(ratios)}",
            flush=True,
        )
        if times:
            print(
                f"    longest gap of the stream: {_spread(gaps['restored'], 1e3)} ms while restoring, "
                f"{_spread(gaps['afresh'], 1e3)} ms while computing; usual "
                f"{statistics.median(b - a for a, b in itertools.pairwise(times)) * 1e3:.0f} ms",
                flush=True,
            )


def _spread(values: list[float], scale: float = 1) -> str:
    digits = 0 if scale > 1 else 3
    low, middle, high = min(values) * scale, statistics.median(values) * scale, max(values) * scale
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


async def run(arguments: argparse.Namespace, node: LocalNode) -> None:
    await node.wait_for(control_pb2.STATE_AVAILABLE, START_S)
    model = open_bundle(Path(node.config.model.bundle)).manifest.model
    async with AsyncClient(node.url, node.config.sockets.statement_key.with_suffix(".pub")) as client:
        bench = Bench(node, client, model)
        await asyncio.sleep(2)
        for tokens in arguments.tokens:
            await bench.pairs(tokens, arguments.repeats)
        if arguments.beside:
            async with bench.streaming() as times:
                await bench.pairs(arguments.tokens[0], 2, times)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="model bundle [default: the demo model's]")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--beside", action="store_true", help="also beside an answer that streams")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    bundle = arguments.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    node = LocalNode(bundle=bundle, overrides=["probe.canary_deadline_s=60", *arguments.overrides])
    try:
        asyncio.run(run(arguments, node))
    finally:
        node.stop()


if __name__ == "__main__":
    main()
