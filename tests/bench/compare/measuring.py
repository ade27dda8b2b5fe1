"""What every peer measures, in its own environment: standard library only.

A peer is a program that is called with a job file and prints one JSON object: `report` makes it of a function that
generates. A job: "gguf" and "hf" (the same weights), "threads", "tasks" and "rounds". A task has a "name", "prompts"
(token ids, all of one length) and "tokens" to generate for each: 0 measures the prompts, more the answers.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Generates greedily for all prompts at once, to exactly so many tokens each, ignoring ends.
Generate = Callable[[Sequence[Sequence[int]], int], None]


def job() -> dict[str, Any]:
    """The job that this program was called with."""
    loaded: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return loaded


def report(name: str, job: dict[str, Any], generate: Generate) -> None:
    """Measures, and prints what came out: tokens a second for each task, one value for each round.

    Of prompts: their tokens by the time to the first token of each. Of answers: the tokens of the second half of ones
    twice as long, by the time that they add to the first half. By then all prompts are through: how an engine shares a
    step between some prompts and others' answers is not what is measured.
    """

    def seconds(prompts: Sequence[Sequence[int]], tokens: int) -> float:
        begun = time.perf_counter()
        generate(prompts, tokens)
        return time.perf_counter() - begun

    results = {}
    for task in job["tasks"]:
        prompts, tokens = task["prompts"], task["tokens"]
        seconds(prompts, max(1, tokens))  # warms up: all of it, or what is mapped but not read yet counts
        if tokens == 0:
            total = sum(map(len, prompts))
            results[task["name"]] = [total / seconds(prompts, 1) for _ in range(job["rounds"])]
        else:
            halves = [(seconds(prompts, tokens), seconds(prompts, 2 * tokens)) for _ in range(job["rounds"])]
            half = statistics.median(first for first, _ in halves)
            times = [whole - half for _, whole in halves]
            results[task["name"]] = [len(prompts) * tokens / taken for taken in times]
    # The marker tells the result from whatever an engine prints.
    print("RESULT " + json.dumps({"name": name, "tasks": results}), flush=True)
