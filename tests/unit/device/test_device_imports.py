"""The device side runs on the base installation: it must not import what only a node has."""

import subprocess
import sys

NODE_ONLY = (
    "grpc",
    "tritonclient",
    "numpy",
    "tokenizers",
    "sentencepiece",
    "jinja2",
    "ahocorasick",
    "llguidance",
    "safetensors",
    "gguf",
    "supervisor",
    "prometheus_client",
    "psutil",
    "pynvml",
    "PIL",
    "torch",
)


def test_imports_with_everything_else_blocked() -> None:
    block = f"import sys\nfor name in {NODE_ONLY!r}: sys.modules[name] = None\n"
    code = block + (
        "import tie.device, tie.device.proxy.service, tie.cli.proxy\n"
        "with tie.device.Client('http://127.0.0.1:1', bytes(32)) as client:\n"
        "    print(client.statement_key == bytes(32))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    assert done.stdout == "True\n"
