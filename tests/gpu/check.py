"""All that needs a GPU, in one command that ends by itself: compiles flashinfer's kernels, tests, measures.

python3 tests/gpu/check.py [--seconds 300]

For a machine on which nothing of a node is installed: it needs PyTorch, NumPy, pytest, flashinfer and nvcc.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCH_S = 100
# Heads of 64 dimensions, with a sliding window and without: all that the tests and the benchmark use.
COMPILE = """
from executor_workload import random_weights, small_model
from tie.bones.cuda.executor import CudaExecutor
config = small_model({kind!r}, 64)
CudaExecutor(config, random_weights(config, "bf16"), num_blocks=8, block_tokens=16, most_decoding=1)
"""
PYTEST = (
    "-m", "pytest", "-q", "-rs", "-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "--import-mode=importlib",
    "-p", "no:cacheprovider", "--durations=8", str(ROOT / "tests" / "gpu"),
)  # fmt: skip


class Run:
    """Programs, one deadline for all, and what they say in a file as well.

    Args:
        seconds: for everything.
        log: the file, or None.
    """

    def __init__(self, seconds: float, log: Path | None) -> None:
        self._end = time.monotonic() + seconds
        self._log = log
        paths = [str(ROOT), str(ROOT / "tests" / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, name: str, process: "subprocess.Popen[str]") -> bool:
        """Waits for a program, killing it and what it started at the deadline; whether it ended well."""
        begun = time.monotonic()
        try:
            said, _ = process.communicate(timeout=max(1.0, self.left))
            ending = "ok" if process.returncode == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            ending = "out of time"
        self.say(f"{said}== {name}: {ending} after {time.monotonic() - begun:.0f} s more, {self.left:.0f} s left")
        return ending == "ok"

    def say(self, text: str) -> None:
        print(text, flush=True)
        if self._log:
            with self._log.open("a") as file:
                file.write(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--shape", default="135m", help="of the benchmark; see bench_cuda.py")
    arguments = parser.parse_args()
    out = os.environ.get("OUT")
    run = Run(arguments.seconds, Path(out) / "check.log" if out else None)
    missing = [name for name in ("torch", "numpy", "pytest", "flashinfer") if importlib.util.find_spec(name) is None]
    if missing:
        run.say(f"check: not installed: {', '.join(missing)}")
        return 1
    look = "import torch, flashinfer; print(torch.__version__, flashinfer.__version__, torch.cuda.get_device_name())"
    if not run.finish("PyTorch, flashinfer, GPU", run.start("-c", look)):
        return 1
    # Beside each other: each is some ten files for nvcc.
    compiling = {kind: run.start("-c", COMPILE.format(kind=kind)) for kind in ("llama", "mistral")}
    well = [run.finish(f"kernels for {kind}", process) for kind, process in compiling.items()]
    if not any(well):
        return 1
    well.append(run.finish("tests", run.start(*PYTEST)))
    bench = (str(ROOT / "tests/bench/bench_cuda.py"), "--shape", arguments.shape)
    seconds = str(int(min(BENCH_S, run.left - 30)))
    well.append(run.left > 40 and run.finish("benchmark", run.start(*bench, "--seconds", seconds)))
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
