"""A node on the compiled forward step: what computes, whose memory the weights are, and that PyTorch is not needed."""

import asyncio
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tie.bones.native import library
from tie.cli.local_node import LocalNode
from tie.device.async_client import AsyncClient
from tie.proto import control_pb2

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(not library.fast(), reason="the native library is not built for this processor"),
]
START_S = 180.0
WITHOUT = ("torch", "functorch")


@pytest.fixture(scope="module")
def native_node(bundle: Path) -> Iterator[LocalNode]:
    node = LocalNode(bundle=bundle, overrides=("probe.canary_deadline_s=30",))
    try:
        asyncio.run(node.wait_for(control_pb2.STATE_AVAILABLE, START_S))
        yield node
    finally:
        left = node.stop()
    assert left == []


def _weight_mappings(process: int) -> list[dict[str, int]]:
    """The fields of /proc/PID/smaps (proc_pid_smaps(5)), in KiB, of each mapping of the owner's weights."""
    found: list[dict[str, int]] = []
    wanted = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            wanted = "/memfd:tie-weights" in line
            if wanted:
                found.append({})
        elif wanted and line.endswith(" kB"):
            name, size = line.removesuffix(" kB").split(":")
            found[-1][name] = int(size)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look into the runtime")
async def test_the_runtime_computes_natively_on_the_owners_memory(native_node):
    status = await native_node.status()
    assert status.runtime.executor == "native-auto"
    async with AsyncClient(native_node.url, native_node.config.sockets.statement_key.with_suffix(".pub")) as client:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = await client.chat(question, model=status.runtime.model, max_tokens=24, temperature=0.0)
        assert "Paris" in (await answer.result()).text  # by now every weight has been read
    (runtime,) = native_node.find("triton_python_backend_stub")
    (mapping,) = _weight_mappings(runtime.pid)
    private = mapping["Private_Clean"] + mapping["Private_Dirty"]
    shared = mapping["Shared_Clean"] + mapping["Shared_Dirty"]
    print(f"weights: {mapping['Size']} KiB mapped, {shared} KiB shared, {private} KiB private")
    assert shared + private > 0.9 * mapping["Size"]
    assert private < 0.05 * mapping["Size"]
    assert not any("torch" in line for line in Path(f"/proc/{runtime.pid}/maps").read_text().splitlines())


def _environment_without_torch(root: Path) -> Path:
    """A virtual environment with everything that this one has but PyTorch; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True, timeout=60)
    python = root / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site, ours = root / "lib" / version / "site-packages", Path(sysconfig.get_path("purelib"))
    for entry in ours.iterdir():
        if entry.name.split("-")[0] not in WITHOUT:
            (site / entry.name).symlink_to(entry)
    scripts = importlib.metadata.distribution("tie-inference").entry_points.select(group="console_scripts")
    for script in scripts:
        program = root / "bin" / script.name
        module, _, function = script.value.partition(":")
        program.write_text(f"#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        program.chmod(0o755)
    return python


def test_the_demonstration_needs_no_pytorch(bundle, tmp_path):
    python = _environment_without_torch(tmp_path / "venv")
    tried = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True, timeout=60, check=False)
    assert "No module named 'torch'" in tried.stderr
    done = subprocess.run(
        [python, "-m", "tie.cli.main", "demo", "--bundle", str(bundle)],
        capture_output=True, text=True, timeout=280, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 6
    print(done.stdout)


def test_without_pytorch_a_node_that_needs_it_says_so(bundle, tmp_path):
    python = _environment_without_torch(tmp_path / "venv")
    program = (
        "from types import SimpleNamespace as Model\n"
        "from tie.daemon.config import RuntimeConfig\n"
        "from tie.runtime.executors import make_executor\n"
        "make_executor(RuntimeConfig(executor='torch'), Model(vision=None), None, 'torch-cpu-bf16')\n"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "PyTorch is not installed" in done.stderr
