"""What `./run lock` does: resolves pyproject.toml's extras to exact versions with hashes, without naming any index.

What is locked stays as it is where it still fits; `./run lock --upgrade` takes the newest of everything. A script
of the standard library, like `bootstrap`; its tools live in a temporary environment.
"""

import hashlib
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
# What torch needs besides, so that the lock pins it.
TORCH_NEEDS = "filelock\nfsspec\njinja2\nnetworkx\nsympy\ntyping-extensions\n"
# Locked one by one: their dependency lists do not fit ours and are not needed (pyproject.toml says why).
ALONE = ("triton", "demo")


def lock() -> None:
    """Writes requirements.lock; arguments go to pip-compile."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    alone = [requirement for extra in ALONE for requirement in extras[extra]]
    with tempfile.TemporaryDirectory() as folder:
        print("run:", "tools")
        tools = Path(folder) / "tools"
        subprocess.run([sys.executable, "-P", "-m", "venv", str(tools)], check=True)
        subprocess.run([str(tools / "bin/pip"), "install", "-q", "pip-tools"], check=True)
        print("run:", "resolving the extras node and test")
        output = Path(folder) / "lock.txt"
        if LOCK.exists():
            output.write_bytes(LOCK.read_bytes())  # pip-compile keeps the versions that it finds there
        options = "--generate-hashes --strip-extras --allow-unsafe --no-header --no-annotate --quiet --no-emit-options"
        emit = "--no-emit-index-url --no-emit-find-links --no-emit-trusted-host"
        subprocess.run(
            [str(tools / "bin/pip-compile"), *options.split(), *emit.split(), "--extra", "node", "--extra", "test",
             *sys.argv[1:], "--output-file", str(output), "pyproject.toml", "-"],
            cwd=ROOT, input=TORCH_NEEDS, text=True, check=True,
        )  # fmt: skip
        text = output.read_text()
        for requirement in alone:
            print("run:", requirement)
            wheels = Path(folder) / "wheels" / requirement
            subprocess.run(
                [str(tools / "bin/pip"), "download", "-q", "--no-deps", "-d", str(wheels), requirement], check=True
            )
            digests = (hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in sorted(wheels.iterdir()))
            text += requirement + "".join(f" \\\n    --hash=sha256:{digest}" for digest in digests) + "\n"
    head = "# The extras node, test, triton and demo with all they need; made by `./run lock`. For torch see `run`.\n"
    LOCK.write_text(head + text)
    print(f"wrote {LOCK}")


if __name__ == "__main__":
    lock()
