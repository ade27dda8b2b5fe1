"""What a recycle costs, and what a registered system prompt saves, on a real node.

    python tests/bench/bench_recycle.py --bundles DIR --prepare          makes the bundles: once, and not timed
    python tests/bench/bench_recycle.py --bundles DIR [--model small|large|plain] [--recycles 3]

For each model: how long a recycle takes (from the request for it to a node that is available again) with the weights
held, and with the model owner killed as well; what was read of the weight files meanwhile; how long the first text
takes of a request with a registered system prompt of about 1,000 tokens, for the first request after a recycle and
for later ones, and of one with a system prompt of the same length that nobody registered. `plain` is the small model
without a registered prompt: what it answers is what the others must answer.

Figures are medians (least to most). On a shared machine only those of one run compare.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tie.assets.build import create_bundle, read_source
from tie.assets.bundle import open_bundle
from tie.assets.sample import make_sample_bundle
from tie.cli import asking, control
from tie.cli.assets import DEMO_MODEL, find_demo_weights
from tie.cli.evidence import WeightWatch
from tie.cli.local_node import LocalNode
from tie.device.client import Client
from tie.device.errors import NodeBusyError
from tie.proto import control_pb2

START_S = 240.0
WANTED_TOKENS = 1000
SETTLE_S = 2.0
RULES = (
    "You answer questions of visitors to a museum.",
    "Begin with the answer itself and explain it afterwards.",
    "Use short sentences and everyday words.",
    "Say so when you do not know something.",
    "Never make up a name, a number, a date or a source.",
    "Answer in the language of the question.",
    "Send visitors to the desk at the entrance for tickets, lost things and guided tours.",
)


def prompt_text(name: str, words_per_token: float) -> str:
    """About 1,000 tokens of rules; `name` makes two of them differ from the first word on."""
    text = f"{name}: "
    number = 0
    while len(text) < WANTED_TOKENS * words_per_token:
        text += f"Rule {number}. {RULES[number % len(RULES)]} "
        number += 1
    return text


# Characters of a token: SmolLM2's tokenizer, and one of single bytes.
PROMPTS = {"small": 3.8, "plain": 3.8, "large": 1.0}


def prepare(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    source = read_source(find_demo_weights())
    for name in ("small", "plain"):
        prompts = {"museum": prompt_text("Museum", PROMPTS[name])} if name == "small" else {}
        create_bundle(source, directory / name, model=DEMO_MODEL, release="bench", system_prompts=prompts)
    if not (directory / "large").exists():
        make_sample_bundle(
            directory / "large",
            layers=8,
            hidden_size=2048,
            heads=16,
            kv_heads=4,
            context_tokens=2048,
            model="synthetic",
            system_prompts={"museum": prompt_text("Museum", PROMPTS["large"])},
        )
    for name in PROMPTS:
        manifest = open_bundle(directory / name).manifest
        weights = sum(manifest.files[each].bytes for each in manifest.weights)
        print(f"{name}: {weights / 1e6:.0f} MB, prompts of {[len(each.token_ids) for each in manifest.system_prompts]}")


async def recycled(node: LocalNode) -> float:
    async with control.connected(node.run_dir) as connection:
        async for progress in connection.node.Recycle(control_pb2.RecycleRequest(reason="operator"), timeout=START_S):
            if progress.finished:
                assert not progress.error, progress.error
                return float(progress.elapsed_s)
    raise AssertionError("the progress ended early")


async def owner_killed(node: LocalNode) -> tuple[float, float]:
    """Seconds until the node is withdrawn, and until it is available again with a new owner."""
    (owner,) = node.find("tie-model-owner")
    before = await node.status()
    begun = time.monotonic()
    owner.send_signal(signal.SIGKILL)
    withdrawn = 0.0
    while True:
        status = await node.status()
        if status.state != control_pb2.STATE_AVAILABLE:
            withdrawn = withdrawn or time.monotonic() - begun
        elif status.owner.owner_instance != before.owner.owner_instance and withdrawn:
            return withdrawn, time.monotonic() - begun
        assert time.monotonic() - begun < START_S
        await asyncio.sleep(0.05)


class Asking:
    """A device that waits where the node is still busy, and until its processes for the next request have started."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._target = asking.target(node.run_dir, None, None, None)
        self._client = Client(self._target.url, self._target.statement_key)

    def __call__(self, system: str, question: str, tokens: int = 16) -> asking.Answer:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        begun = time.monotonic()
        while time.monotonic() < begun + 30 and not self._prepared():
            time.sleep(0.2)
        for _ in range(200):
            try:
                return asking.ask(
                    self._client, messages, lambda _: None, model=self._target.model, max_tokens=tokens,
                    temperature=0.0, ignore_eos=True,
                )  # fmt: skip
            except NodeBusyError:
                time.sleep(0.1)
        raise AssertionError("the node stays busy")

    def _prepared(self) -> bool:
        """Whether enough apps are there that have had time to start."""
        apps = self._node.find("tie-cloud-app")
        old = [app for app in apps if time.time() - app.create_time() > SETTLE_S]
        return len(old) == len(apps) >= self._node.config.cloudboard.standby

    def close(self) -> None:
        self._client.__exit__(None, None, None)


def measure(directory: Path, name: str, recycles: int) -> dict:
    bundle = open_bundle(directory / name)
    node = LocalNode(bundle=bundle.directory, overrides=("runtime.dtype=f32", "probe.canary_deadline_s=30"))
    registered, other = (prompt_text(word, PROMPTS[name]) for word in ("Museum", "Gallery"))
    figures: dict = {
        key: [] for key in ("recycle_s", "read", "withdrawn_s", "owner_restart_s", "first_s", "hot_s", "cold_s")
    }
    try:
        begun = time.monotonic()
        asyncio.run(node.wait_for(control_pb2.STATE_AVAILABLE, START_S))
        figures["start_s"] = time.monotonic() - begun
        ask = Asking(node)
        ask(other, "Hello?")  # whatever is done once only
        for turn in range(recycles):
            watch = WeightWatch(bundle.directory, bundle.manifest.weights)
            before = asyncio.run(node.status())
            figures["recycle_s"].append(asyncio.run(recycled(node)))
            after = asyncio.run(node.status())
            figures["read"].append((after.owner.weight_bytes_read - before.owner.weight_bytes_read, *watch.count()))
            for key, system, question in (
                ("first_s", registered, "Why is the sky blue?"),
                ("hot_s", registered, "Why is grass green?"),
                ("cold_s", other, f"Why is snow white, number {turn}?"),
            ):
                answer = ask(system, question)
                figures[key].append(answer.first_s)
                figures[f"{key}_cached"] = f"{answer.cached_tokens} of {answer.prompt_tokens}"
        figures["text"] = ask(registered, "Why is the sky blue?", 32).text
        for _ in range(recycles - 1):
            withdrawn, back = asyncio.run(owner_killed(node))
            figures["withdrawn_s"].append(withdrawn)
            figures["owner_restart_s"].append(back)
        status = asyncio.run(node.status())
        figures["pool"] = f"{status.runtime.prefix.blocks} blocks, {status.owner.pool_bytes} bytes"
        figures["text_after"] = ask(registered, "Why is the sky blue?", 32).text
        ask.close()
    finally:
        node.stop()
    return figures


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} ({min(values):.2f}-{max(values):.2f})"


def report(name: str, figures: dict) -> None:
    say: Callable[[str], None] = print
    say(f"{name}: start {figures['start_s']:.1f} s; pool {figures['pool']}")
    say(f"  recycle, weights held      {shown(figures['recycle_s'])} s")
    say(f"  read of the weight files meanwhile (bytes by the owner, opens, reads by anybody): {figures['read']}")
    say(f"  owner killed as well       {shown(figures['owner_restart_s'])} s")
    say(f"  withdrawn after            {shown(figures['withdrawn_s'])} s")
    for key, text in (("first_s", "first after a recycle"), ("hot_s", "later"), ("cold_s", "not registered")):
        cold = statistics.median(figures[key]) / statistics.median(figures["cold_s"])
        say(f"  first text, {text:22}{shown(figures[key])} s  {cold:5.2f} of cold, cached {figures[f'{key}_cached']}")
    say(f"  the same text before and after: {figures['text'] == figures['text_after']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, required=True)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--model", choices=PROMPTS, action="append")
    parser.add_argument("--recycles", type=int, default=3)
    parser.add_argument("--json", type=Path, help="adds the figures of each model to a file")
    arguments = parser.parse_args()
    # Without compiled modules beside them, the processes of every request would be timed while they compile.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if arguments.prepare:
        prepare(arguments.bundles)
        return
    for name in arguments.model or PROMPTS:
        figures = measure(arguments.bundles, name, arguments.recycles)
        report(name, figures)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps({name: figures}) + "\n")


if __name__ == "__main__":
    main()
