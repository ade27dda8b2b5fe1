"""All that needs a GPU, in one command that ends by itself: compiles flashinfer's kernels, tests, measures.

python3 tests/gpu/check.py [--seconds 300] [--shape 135m]

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
LOOK = "import torch, flashinfer; print(torch.__version__, flashinfer.__version__, torch.cuda.get_device_name())"
# Heads of 64 dimensions, with a sliding window and without: all that the tests and the benchmark use.
COMPILE = """
from executor_workload import random_weights, small_model
from tie.bones.cuda.executor import CudaExecutor
config = small_model({kind!r}, 64)
CudaExecutor(config, random_weights(config, "bf16"), num_blocks=8, block_tokens=16, most_decoding=1)
"""
# Without the project's configuration, which asks for plugins that only its own environment has.
PYTEST = (
    "-m", "pytest", "-v", "-rs", "-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "--import-mode=importlib",
    "-p", "no:cacheprovider", "--durations=8", "--tb=short", str(ROOT / "tests" / "gpu"),
)  # fmt: skip


class Run:
    """Programs with one deadline for all of them; what they say goes where ours does.

    Args:
        seconds: for everything.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        paths = [str(ROOT), str(ROOT / "tests" / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finish(self, name: str, process: "subprocess.Popen[bytes]") -> bool:
        """Waits for a program, and kills it with all that it started at the deadline; whether it ended well."""
        begun = time.monotonic()
        try:
            code = process.wait(max(1.0, self.left))
            ending = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ending = "out of time"
        print(f"== {name}: {ending} after {time.monotonic() - begun:.0f} s more, {self.left:.0f} s left", flush=True)
        return ending == "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--shape", default="135m", help="of the benchmark's model; see bench_cuda.py")
    arguments = parser.parse_args()
    missing = [name for name in ("torch", "numpy", "pytest", "flashinfer") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"check: not installed: {', '.join(missing)}")
        return 1
    run = Run(arguments.seconds)
    if not run.finish("PyTorch, flashinfer, GPU", run.start("-c", LOOK)):
        return 1
    # Beside each other: each is some ten files for nvcc.
    compiling = {kind: run.start("-c", COMPILE.format(kind=kind)) for kind in ("llama", "mistral")}
    well = [run.finish(f"kernels for {kind}", process) for kind, process in compiling.items()]
    if any(well):
        well.append(run.finish("tests", run.start(*PYTEST)))
        seconds = str(int(max(20, min(BENCH_S, run.left - 30))))
        bench = run.start(str(ROOT / "tests/bench/bench_cuda.py"), "--shape", arguments.shape, "--seconds", seconds)
        well.append(run.finish("benchmark", bench))
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
