"""What every peer measures, in its own environment: standard library only.

A peer is a program that is called with a job file and prints one JSON object: `report` makes it of a function that
generates. A job: "gguf" and "hf" (the same weights), "threads", "streams", "prompts" (token ids, all of one length),
"long_prompt", "max_tokens", "rounds".
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Generates greedily for all prompts at once, to exactly so many tokens each, ignoring ends; returns tokens generated.
Generate = Callable[[Sequence[Sequence[int]], int], int]


def job() -> dict[str, Any]:
    """The job that this program was called with."""
    loaded: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return loaded


def report(name: str, job: dict[str, Any], generate: Generate) -> None:
    """Measures, and prints what came out.

    "decode" is answers' tokens a second over whole batches, their short prompts included, by number of streams;
    "prefill" is tokens a second of one long prompt up to its first token. One value for each round.
    """
    decode: dict[str, list[float]] = {}
    for streams in job["streams"]:
        prompts = job["prompts"][:streams]
        generate(prompts, 4)  # warms up
        decode[str(streams)] = []
        for _ in range(job["rounds"]):
            begun = time.perf_counter()
            tokens = generate(prompts, job["max_tokens"])
            decode[str(streams)].append(tokens / (time.perf_counter() - begun))
    prefill = []
    for _ in range(job["rounds"] + 1):
        begun = time.perf_counter()
        generate([job["long_prompt"]], 1)
        prefill.append(len(job["long_prompt"]) / (time.perf_counter() - begun))
    # The marker tells the result from whatever an engine prints.
    print("RESULT " + json.dumps({"name": name, "decode": decode, "prefill": prefill[1:]}), flush=True)
