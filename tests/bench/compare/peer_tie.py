"""Ours: the engine in this process, on a model owner's arena, below Triton and the app."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from measuring import job, report

sys.path.insert(0, str(Path(__file__).parents[1]))  # engine_target is a module of the benchmarks beside this folder

from engine_target import EngineTarget, running

from tie.proto import runtime_pb2


def main() -> None:
    asked = job()
    overrides = [f"runtime.threads={asked['threads']}", "runtime.dtype=bf16"]
    with running(Path(asked["bundle"]), overrides) as (service, _):
        target = EngineTarget(service.engine)

        async def all_at_once(prompts: Sequence[Sequence[int]], tokens: int) -> int:
            requests = [
                runtime_pb2.GenerateRequest(token_ids=prompt, max_tokens=tokens, ignore_eos=True) for prompt in prompts
            ]
            usages = await asyncio.gather(*(target.generate(request, lambda _at, _count: None) for request in requests))
            return sum(usage.completion_tokens for usage in usages)

        report("TIE", asked, lambda prompts, tokens: asyncio.run(all_at_once(prompts, tokens)))


if __name__ == "__main__":
    main()
