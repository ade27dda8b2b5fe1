"""What every peer measures, in its own environment: standard library only.

A peer is a program that is called with a job file and prints one JSON object: `report` makes it of a function that
generates. A job: "gguf" and "hf" (the same weights), "threads", "tasks" and "rounds". A task has a "name", "prompts"
(token ids, all of one length) and "tokens" to generate for each: 0 measures the prompts, more the answers.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Heard = Callable[[int, float, int], None]
"""Takes the place of a prompt, a time, and how many tokens of its answer have come then."""

Generate = Callable[[Sequence[Sequence[int]], int, Heard], None]
"""Generates greedily for all prompts at once, to exactly so many tokens each, ignoring ends, and tells as they come."""


class Answers:
    """What was heard of some answers. The clock is the caller's."""

    def __init__(self) -> None:
        self._events: list[tuple[int, float, int]] = []

    def heard(self, prompt: int, at: float, tokens: int) -> None:
        """See `Heard`."""
        self._events.append((prompt, at, tokens))

    def speed(self) -> float:
        """Tokens a second while all answers came: after the last one's first, up to the end of the first to end.

        How an engine shares a step between some prompts and others' answers is not measured by this.
        """
        times: dict[int, list[float]] = {}
        for prompt, at, _ in self._events:
            times.setdefault(prompt, []).append(at)
        begin, end = max(map(min, times.values())), min(map(max, times.values()))
        if begin >= end:
            raise SystemExit("answers are too short: one had ended before another began")
        return sum(tokens for _, at, tokens in self._events if begin < at <= end) / (end - begin)


def job() -> dict[str, Any]:
    """The job that this program was called with."""
    loaded: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return loaded


def report(name: str, job: dict[str, Any], generate: Generate) -> None:
    """Measures, and prints what came out: tokens a second for each task, one value for each round.

    Of prompts: their tokens by the time to the first token of each. Of answers: see `Answers.speed`.
    """

    def speed(prompts: Sequence[Sequence[int]], tokens: int) -> float:
        answers, begun = Answers(), time.perf_counter()
        generate(prompts, tokens or 1, answers.heard)
        return answers.speed() if tokens else sum(map(len, prompts)) / (time.perf_counter() - begun)

    results = {}
    for task in job["tasks"]:
        speed(task["prompts"], task["tokens"])  # warms up: all of it, or what is mapped but not read yet counts
        results[task["name"]] = [speed(task["prompts"], task["tokens"]) for _ in range(job["rounds"])]
    # The marker tells the result from whatever an engine prints.
    print("RESULT " + json.dumps({"name": name, "tasks": results}), flush=True)
