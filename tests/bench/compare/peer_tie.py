"""Ours: the engine with scheduler and sampling in this process, on a model owner's arena, below Triton and the app.

`peer_tie.py JOB WEIGHTS` takes `runtime.weights`, or "torch" for the PyTorch executor. No guesses ahead: peers make
none, and greedy answers to random prompts repeat themselves.
"""

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from measuring import Heard, job, report

sys.path.insert(0, str(Path(__file__).parents[1]))  # engine_target is a module of the benchmarks beside this folder

from engine_target import EngineTarget, running

from tie.proto import runtime_pb2


def main() -> None:
    asked = job()
    weights = sys.argv[2]
    executor = "torch" if weights == "torch" else "native"
    overrides = [f"runtime.threads={asked['threads']}", f"runtime.executor={executor}", "runtime.speculation=off"]
    if executor == "native":
        overrides.append(f"runtime.weights={weights}")
    with running(Path(asked["bundle"]), overrides) as (service, _):
        target = EngineTarget(service.engine)

        async def all_at_once(prompts: Sequence[Sequence[int]], tokens: int, heard: Heard) -> None:
            requests = [
                runtime_pb2.GenerateRequest(token_ids=prompt, max_tokens=tokens, ignore_eos=True) for prompt in prompts
            ]
            usages = await asyncio.gather(
                *(target.generate(request, partial(heard, number)) for number, request in enumerate(requests))
            )
            if any(usage.completion_tokens != tokens for usage in usages):
                raise SystemExit("an answer has another length than was asked")

        report(f"TIE, {weights}", asked, lambda *of: asyncio.run(all_at_once(*of)))


if __name__ == "__main__":
    main()
