"""How fast the executor for a GPU is: decoding with and without graphs, and prompts. Random weights of a model's shape.

python tests/bench/bench_cuda.py [--shape 135m] [--kernel flashinfer] [--seconds 120]

A step is one call of `forward` on the host's clock, from the batch to logits on the host; no scheduler, no sampling.
Median of the steps and, behind it, the middle half. Needs PyTorch and NumPy, nothing of a node.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # on a machine where nothing is installed

import torch

from tie.bones.batch import Batch, SequenceSlice
from tie.bones.config import ModelConfig
from tie.bones.cuda.executor import CudaExecutor
from tie.bones.llama import tensor_shapes

BLOCK = 16
STREAMS = (1, 8, 16, 32)
CONTEXTS = (128, 1000)
PROMPTS = (512, 2048)
WARM_UPS = 3
MOST_STEPS = 200

_LLAMA = {"kind": "llama", "context_tokens": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
SHAPES = {
    # SmolLM2-135M
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3}
    | {"head_dim": 64, "vocab_size": 49152, "rope_theta": 1e5},
    # Llama 3.2 1B
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8}
    | {"head_dim": 64, "vocab_size": 128256, "rope_theta": 5e5},
    # to try the script itself
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    | {"head_dim": 64, "vocab_size": 199, "rope_theta": 1e4},
}


def random_model(shape: str) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = ModelConfig(**(_LLAMA | SHAPES[shape]))
    tensors = {}
    for name, size in tensor_shapes(config).items():
        matrix = len(size) > 1
        kind = torch.bfloat16 if matrix else torch.float32
        tensors[name] = torch.empty(size, dtype=kind).normal_(std=size[-1] ** -0.5 if matrix else 1.0)
    return config, tensors


def steps(work: Callable[[], object], seconds: float) -> list[float]:
    """The time of each of many steps, in milliseconds."""
    for _ in range(WARM_UPS):
        work()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < MOST_STEPS and (time.perf_counter() < until or len(times) < 3):
        begun = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def decoding(executor: CudaExecutor, streams: int, context: int) -> Callable[[], object]:
    """A step of `streams` sequences that hold `context` tokens each."""
    pages = context // BLOCK + 1
    tables = [range(stream * pages, (stream + 1) * pages) for stream in range(streams)]
    for table in tables:
        executor.forward(Batch((SequenceSlice([1] * context, 0, table, 0),)))
    batch = Batch(tuple(SequenceSlice([1], context, table, 1) for table in tables))
    return lambda: executor.forward(batch)


def prompt(executor: CudaExecutor, tokens: int) -> Callable[[], object]:
    batch = Batch((SequenceSlice([1] * tokens, 0, range(tokens // BLOCK), 1),))
    return lambda: executor.forward(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--kernel", choices=("flashinfer", "reference"), default="flashinfer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=120, help="for all of it, about")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench_cuda: PyTorch finds no GPU here")
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", flush=True)

    config, tensors = random_model(arguments.shape)
    say(f"weights of the shape {arguments.shape}: {sum(t.nbytes for t in tensors.values()) / 1e9:.2f} GB")
    executors = {}
    for graphs in (True, False):
        begun = time.perf_counter()
        executors[graphs] = CudaExecutor(
            config,
            tensors,
            num_blocks=max(STREAMS) * (max(CONTEXTS) // BLOCK + 1),
            block_tokens=BLOCK,
            most_decoding=max(STREAMS),
            device=arguments.device,
            kernel=arguments.kernel,
            graphs=graphs,
        )
        what = "copied, and graphs captured" if graphs else "copied"
        say(f"{what} in {time.perf_counter() - begun:.1f} s")

    cases: list[tuple[str, int, bool, Callable[[CudaExecutor], Callable[[], object]]]] = [
        (f"decode {streams:2}, context {context:4}", streams, graphs,
         lambda executor, streams=streams, context=context: decoding(executor, streams, context))
        for context in CONTEXTS for streams in STREAMS for graphs in (True, False)
    ]  # fmt: skip
    cases += [
        (f"prompt of {tokens}", tokens, False, lambda executor, tokens=tokens: prompt(executor, tokens))
        for tokens in PROMPTS
    ]
    found: dict[tuple[str, bool], tuple[int, list[float]]] = {}
    for index, (name, tokens, graphs, make) in enumerate(cases):
        left = arguments.seconds - (time.perf_counter() - began)
        times = steps(make(executors[graphs]), max(0.0, left / (len(cases) - index)) / 2)
        found[name, graphs] = (tokens, times)
        say(f"{name}, {'graph' if graphs else 'launched'}: {statistics.median(times):.3f} ms, {len(times)} steps")

    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"\n{device}, PyTorch {torch.__version__}, kernel {arguments.kernel}, shape {arguments.shape}, bf16")
    print(f"{'':26} {'graph: ms':>22} {'tok/s':>9} {'launched: ms':>22} {'tok/s':>9} {'ratio':>6}")
    for name in dict.fromkeys(name for name, _ in found):
        line = f"{name:26}"
        medians = []
        for graphs in (True, False):
            if (name, graphs) not in found:
                line += f" {'-':>22} {'-':>9}"
                continue
            tokens, times = found[name, graphs]
            low, median, high = statistics.quantiles(times, n=4)
            medians.append(median)
            line += f" {f'{median:.3f} ({low:.3f}-{high:.3f})':>22} {1e3 * tokens / median:9.0f}"
        print(line + (f" {medians[1] / medians[0]:6.2f}" if len(medians) > 1 else ""))


if __name__ == "__main__":
    main()
