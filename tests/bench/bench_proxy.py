"""What the whole path costs before the first text: proxy → node → app → engine and back, beside the engine's own.

python tests/bench/bench_proxy.py [--streams 4] [--rounds 25] [--max-tokens 16] [--set cloudboard.standby=8]

Round by round and never two at once: as many requests as there are streams, at the same moment, straight to the node's
Triton, then with the device's client, then through `tie proxy` in a process of its own. Before each round as many apps
stand by as it needs, so that no figure holds the start of a process. The overhead is the difference of percentiles.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from bench_node import CANARY, START_S, settled

from tie.cli import asking, bench_load
from tie.cli.assets import demo_bundle
from tie.cli.bench_load import Call, Heard, Load, Run, Target, Usage
from tie.cli.bench_prompts import random_prompts
from tie.cli.bench_report import percentile
from tie.cli.bench_targets import node
from tie.cli.bench_triton import triton
from tie.cli.local_node import LocalNode
from tie.cli.settings import cache_dir
from tie.daemon import rpc
from tie.proto import control_pb2, metrics_pb2, metrics_pb2_grpc


class ProxyTarget:
    """See `tie.cli.bench_load.Target`: an HTTP client that knows nothing of TIE."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def ask(self, call: Call, heard: Heard) -> Usage:
        body = {
            "model": self._model,
            "messages": call.prompt.messages,
            "max_tokens": call.max_tokens,
            "temperature": call.temperature,
            "seed": call.seed,
            "ignore_eos": call.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage = None
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    usage = chunk.get("usage") or usage
                    if any(choice["delta"].get("content") for choice in chunk["choices"]):
                        heard(time.monotonic(), 0)
        assert usage is not None
        return Usage(usage["prompt_tokens"], usage["completion_tokens"])


@asynccontextmanager
async def proxy(local: LocalNode, model: str) -> AsyncIterator[ProxyTarget]:
    command = [sys.executable, "-P", "-m", "tie.cli.main", "proxy", "--port", "0", "--run-dir", str(local.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            said = process.stdout.readline()
            url = next(word for word in said.split() if word.startswith("http://")).removesuffix("/v1")
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=START_S) as http:
                yield ProxyTarget(http, model)
        finally:
            process.terminate()


async def firsts(target: Target, arguments: argparse.Namespace, seed: int) -> list[float]:
    """Seconds to the first text of each request of a round."""
    run = Run(arguments.streams, time.monotonic())
    load = Load(arguments.streams, None, arguments.max_tokens, seed=seed)
    await bench_load.run(target, random_prompts(arguments.prompt_tokens, seed), load, run, asyncio.Event())
    assert all(sample.kind == "ok" for sample in run.samples), [sample.error for sample in run.samples]
    return [sample.first_s for sample in run.samples]


async def standing_by(local: LocalNode, count: int) -> None:
    """Waits until so many apps are ready, by CloudBoard's own count, and nothing starts or ends any more."""
    line = f"tie_cloudboard_standby {float(count)}\n"
    async with asyncio.timeout(START_S), rpc.connect(local.config.sockets.node) as channel:
        stub = metrics_pb2_grpc.MetricsStub(channel)
        while True:
            await settled(local, count)
            if line in (await stub.Scrape(metrics_pb2.ScrapeRequest(), timeout=5)).text:
                return


async def rounds(local: LocalNode, arguments: argparse.Namespace) -> dict[str, list[float]]:
    await local.wait_for(control_pb2.STATE_AVAILABLE, START_S)
    whom = asking.target(local.run_dir, None, None, None)
    figures: dict[str, list[float]] = {"engine behind Triton": [], "device client": [], "tie proxy": []}
    async with triton(local.run_dir) as below, node(whom) as client, proxy(local, whom.model) as above:
        for seed in range(arguments.rounds + 1):
            for name, target in zip(figures, (below, client, above), strict=True):
                await standing_by(local, arguments.streams)
                measured = await firsts(target, arguments, seed)
                figures[name] += measured if seed else []  # the first round warms up
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    bundle = demo_bundle(cache_dir() / "demo-bundle").directory
    overrides = [CANARY, f"cloudboard.standby={arguments.streams}", *arguments.overrides]
    local = LocalNode(bundle=bundle, overrides=overrides)
    try:
        figures = asyncio.run(rounds(local, arguments))
    finally:
        left = local.stop()
    assert left == [], left
    shares = (0.5, 0.9, 0.99)
    base = [percentile(sorted(figures["engine behind Triton"]), share) for share in shares]
    print(f"first text, ms: p50, p90, p99 of {len(figures['tie proxy'])} requests, {arguments.streams} at once")
    for name, values in figures.items():
        found = [percentile(sorted(values), share) for share in shares]
        own = "  ".join(f"{value * 1000:6.1f}" for value in found)
        more = "  ".join(f"{(value - least) * 1000:+6.1f}" for value, least in zip(found, base, strict=True))
        print(f"{name:21} {own}   over the engine {more}")


if __name__ == "__main__":
    main()
