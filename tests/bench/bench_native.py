"""How fast the native step is beside the PyTorch executor: medians, spreads and ratios within one run.

python tests/bench/bench_native.py MODEL.gguf [--weights q4 q8 bf16] [--threads 2] [--level avx2] [--repeats 5]

Rounds of all contestants take turns, so that what else the machine does meets all of them. Sampling is not part of it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "bones_native"))  # packs without a model owner

import msgspec
import torch
from conftest import pack

from tie.assets.gguf_reader import read_gguf
from tie.assets.tensors import read_rows
from tie.bones.batch import Batch, SequenceSlice
from tie.bones.config import ModelConfig
from tie.bones.executor import Executor
from tie.bones.native.executor import NativeExecutor

BLOCK = 16
STREAMS = (1, 8, 16)
CHUNK = 256


def load(path: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    source = read_gguf(path)
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    tensors = {
        stored.name: np.array(read_rows(stored, raw[stored.offset : stored.offset + stored.bytes], 0, stored.rows))
        .reshape(stored.shape)
        for stored in source.tensors
    }  # fmt: skip
    return ModelConfig.from_json(msgspec.json.encode(source.architecture)), tensors


def decode(executor: Any, streams: int, context: int) -> Callable[[], int]:
    """One token for each of some streams."""
    blocks = context // BLOCK + 1
    tables = [tuple(range(stream * blocks, (stream + 1) * blocks)) for stream in range(streams)]
    for table in tables:
        for _ in prefill_chunks(executor, context, table):
            pass
    batch = Batch(tuple(SequenceSlice((1,), context, table, 1) for table in tables))

    def work() -> int:
        executor.forward(batch)
        return streams

    return work


def prefill_chunks(executor: Any, tokens: int, table: tuple[int, ...]) -> Iterator[None]:
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        executor.forward(Batch((SequenceSlice((1,) * count, start, table, int(start + count == tokens)),)))
        yield


def prefill(executor: Any, tokens: int) -> Callable[[], int]:
    table = tuple(range(tokens // BLOCK))

    def work() -> int:
        for _ in prefill_chunks(executor, tokens, table):
            pass
        return tokens

    return work


def speed(work: Callable[[], int], seconds: float) -> float:
    """Tokens per second over at least `seconds`."""
    work()
    start, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        done += work()
    return done / passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--weights", nargs="+", default=["q4", "q8", "bf16"], choices=("q4", "q8", "bf16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--level", default=None)
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--long-context", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    config, tensors = load(arguments.model)
    blocks = max(max(STREAMS) * (arguments.context // BLOCK + 1), arguments.long_context // BLOCK + 1, 2048 // BLOCK)
    common = {"num_blocks": blocks, "block_tokens": BLOCK, "threads": arguments.threads}

    contestants: dict[str, Any] = {}
    matrices = {n: torch.from_numpy(t).bfloat16() if t.ndim > 1 else torch.from_numpy(t) for n, t in tensors.items()}
    contestants["torch bf16"] = Executor(config, matrices, dtype="bf16", **common)
    for weights in arguments.weights:
        packed, _ = pack(config, tensors, weights)
        contestants[f"native {weights}"] = NativeExecutor(
            config, packed, weights=weights, level=arguments.level, **common
        )
        level = contestants[f"native {weights}"].name
    print(f"{level}, {arguments.threads} threads, tokens per second: median (least to most) of {arguments.repeats}")

    tasks: dict[str, Callable[[Any], Callable[[], int]]] = {
        f"decode, {streams:2} streams": lambda executor, n=streams: decode(executor, n, arguments.context)
        for streams in STREAMS
    }
    tasks[f"decode, context {arguments.long_context}"] = lambda executor: decode(executor, 1, arguments.long_context)
    tasks["prefill, 512"] = lambda executor: prefill(executor, 512)
    tasks["prefill, 2048"] = lambda executor: prefill(executor, 2048)
    for task, make in tasks.items():
        works = {name: make(executor) for name, executor in contestants.items()}
        found: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(arguments.repeats):
            for name, work in works.items():
                found[name].append(speed(work, arguments.seconds))
        reference = statistics.median(found["torch bf16"])
        for name, speeds in found.items():
            middle = statistics.median(speeds)
            spread = f"({min(speeds):.0f} to {max(speeds):.0f})"
            print(f"{task:22} {name:12} {middle:8.1f} {spread:16} {middle / reference:6.2f} x", flush=True)


if __name__ == "__main__":
    main()
