"""Coverage-guided fuzzing of one target (atheris, which drives libFuzzer; the extra `fuzz`).

    python tests/fuzz/fuzz.py TARGET [--runs 1000000] [--seconds 300] [--seed 1] [--keep]

Targets: header, import, store, reply, entry (on the way of a KV cache); proxy; http, frames, envelope, proto, request,
template (on the way of a request); image (fuzz_images.py goes on without coverage, and faster). Prints executions,
coverage and peak memory. An input that breaks something is written beside the working corpus and ends the run with its
path. --keep takes some of what was found into tests/fuzz/corpus.
"""

import argparse
import hashlib
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fuzz_targets import CORPUS, TARGETS

_HERE = Path(__file__).parent
_MEMORY_MIB = 1024
_SLOWEST_S = 10
_LONGEST = {"http": 4096}  # of an input, in bytes: a sealed key alone has 1168
_KEPT = 60
_INSTRUMENTED = (
    "kvxfer", "tie.store", "tie.warden", "tie.runtime.kv_blocks", "tie.runtime.request", "tie.runtime.images",
    "tie.device", "tie.app",
    "tie.http", "tie.envelope", "tie.cloudboard.sealed_body", "tie.cloudboard.uploads", "tie.cloudboard.relay",
    "tie.daemon.frames", "tie.assets.chat", "tie.assets.marking", "h11", "h2", "hpack", "hyperframe",
)  # fmt: skip
_INNER = f"""
import sys
import atheris
with atheris.instrument_imports(include={list(_INSTRUMENTED)}):
    import fuzz_targets
target = fuzz_targets.TARGETS[sys.argv.pop(1)]
atheris.Setup(sys.argv, target)
atheris.Fuzz()
"""


def _libfuzzer(target: str, *options: str) -> str:
    """Runs the instrumented target; gives what libFuzzer said."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(_HERE)!r})\n{_INNER}", target, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = done.stdout.decode(errors="replace")
    if done.returncode:
        sys.exit(f"{said[-4000:]}\nfuzz: {target} broke (exit code {done.returncode})")
    return said


def fuzz(target: str, runs: int, seconds: int, seed: int, corpus: Path) -> str:
    """One campaign; a line that says what it did."""
    began = time.monotonic()
    said = _libfuzzer(
        target,
        f"-runs={runs}",
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-max_len={_LONGEST.get(target, 1024)}",
        f"-rss_limit_mb={_MEMORY_MIB}",
        f"-timeout={_SLOWEST_S}",
        f"-artifact_prefix={corpus}/",
        "-print_final_stats=1",
        str(corpus),
        str(CORPUS / target),
    )
    took = time.monotonic() - began
    executed = int(re.findall(r"stat::number_of_executed_units:\s*(\d+)", said)[-1])
    memory = int(re.findall(r"stat::peak_rss_mb:\s*(\d+)", said)[-1])
    edges, features = re.findall(r"cov: (\d+) ft: (\d+)", said)[-1]
    return (
        f"{target}: {executed} executions in {took:.0f} s ({executed / took:.0f}/s), seed {seed}; "
        f"{edges} edges, {features} features; peak memory {memory} MiB"
    )


def keep(target: str, corpus: Path) -> None:
    """Takes what libFuzzer has kept, each input for what it alone covers, into the repository: the smallest of it."""
    found = sorted((path for path in corpus.iterdir() if path.stat().st_size), key=lambda path: path.stat().st_size)
    for path in found[:_KEPT]:
        data = path.read_bytes()
        (CORPUS / target / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="the working corpus; a temporary one by default")
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    # What a memfd of a lying size would take shows as an error, and not as a full machine.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        corpus = arguments.corpus or Path(temporary)
        corpus.mkdir(parents=True, exist_ok=True)
        print(fuzz(arguments.target, arguments.runs, arguments.seconds, arguments.seed, corpus), flush=True)
        if arguments.keep:
            keep(arguments.target, corpus)


if __name__ == "__main__":
    main()
