"""How fast bones decodes, prefills and samples: ratios within one run, for machines differ and are busy.

python tests/bench/bench_bones.py MODEL.gguf [--dtype bf16] [--threads 2] [--context 128]
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from tie.assets.gguf_reader import read_gguf
from tie.assets.tensors import read_rows
from tie.bones.config import ModelConfig
from tie.bones.executor import Batch, Executor, SequenceSlice
from tie.bones.sampler import SampleRow, SamplingParams, sample

BLOCK = 16
STREAMS = (1, 8, 16)


def load(path: Path, *, dtype: str, threads: int, num_blocks: int) -> Executor:
    source = read_gguf(path)
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    tensors = {}
    for stored in source.tensors:
        values = read_rows(stored, raw[stored.offset : stored.offset + stored.bytes], 0, stored.rows)
        tensor = torch.tensor(values).reshape(stored.shape)
        tensors[stored.name] = tensor.bfloat16() if dtype == "bf16" and tensor.dim() > 1 else tensor
    config = ModelConfig.from_json(msgspec.json.encode(source.architecture))
    return Executor(config, tensors, num_blocks=num_blocks, block_tokens=BLOCK, dtype=dtype, threads=threads)


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The quickest of `repeats` runs: what else the machine does only ever adds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def decode(executor: Executor, streams: int, context: int) -> float:
    """Tokens per second of greedy decoding, sampler included, all streams at `context`."""
    blocks = context // BLOCK + 1
    tables = [list(range(stream * blocks, (stream + 1) * blocks)) for stream in range(streams)]
    executor.forward(Batch(tuple(SequenceSlice([1] * context, 0, table, 0) for table in tables)))
    rows = [SampleRow(SamplingParams(), 0)] * streams
    batch = Batch(tuple(SequenceSlice([1], context, table, 1) for table in tables))
    return streams / seconds(lambda: sample(executor.forward(batch), rows), 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    arguments = parser.parse_args()
    needed = max(STREAMS) * (arguments.context // BLOCK + 1) + 1024 // BLOCK
    executor = load(arguments.model, dtype=arguments.dtype, threads=arguments.threads, num_blocks=needed)

    print(f"{executor.layout_id}, {arguments.threads} threads, context {arguments.context}")
    alone = decode(executor, 1, arguments.context)
    for streams in STREAMS:
        speed = decode(executor, streams, arguments.context)
        print(f"decode, {streams:2} streams  {speed:8.1f} tok/s  {speed / alone:5.2f} x one stream")
    for tokens in (128, 512):
        prompt = Batch((SequenceSlice([1] * tokens, 0, list(range(tokens // BLOCK)), 1),))
        speed = tokens / seconds(lambda prompt=prompt: executor.forward(prompt), 5)
        print(f"prefill, {tokens:4} tokens {speed:8.1f} tok/s  {speed / alone:5.2f} x one stream")

    step = 16 / decode(executor, 16, arguments.context)
    logits = torch.randn(16, executor.vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    ways = {
        "greedy": SamplingParams(),
        "temperature": SamplingParams(temperature=0.8),
        "top-k 40": SamplingParams(temperature=0.8, top_k=40),
        "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
        "all": SamplingParams(
            temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.1
        ),
    }
    for name, params in ways.items():
        rows = [SampleRow(params, 3, prompt_ids=range(500), output_ids=range(100, 300))] * 16
        taken = seconds(lambda rows=rows: sample(logits, rows), 20)
        print(f"sampler, 16 rows, {name:12} {taken * 1e3:7.2f} ms  {taken / step:6.1%} of a step")


if __name__ == "__main__":
    main()
