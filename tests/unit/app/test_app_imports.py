"""The app's import budget: a process per request pays for every module."""

import json
import subprocess
import sys

# The heavy ones, and those that would put the shared parts of a node into a user's process.
FORBIDDEN = {
    "torch", "transformers", "gguf", "safetensors", "numpy", "tie.runtime", "tie.bones", "tie.cloudboard", "tie.cli",
    "PIL", "kornia_rs", "h2", "httpx", "prometheus_client", "pynvml", "llguidance", "sentencepiece", "rich", "click",
}  # fmt: skip
# What it may import from outside the standard library, and why.
ALLOWED = {
    "google": "protobuf: every message",
    "grpc": "Triton's protocol",
    "cython_runtime": "of grpc",
    "grpc_health": "of grpc, which looks for its optional packages",
    "grpc_tools": "of grpc, the same",
    "typing_extensions": "of grpc",
    "tritonclient": "that protocol's generated messages, without the package's own start-up",
    "tokenizers": "text to token ids",
    "jinja2": "chat templates",
    "markupsafe": "of jinja2",
    "msgspec": "node.toml and the manifest",
    "cryptography": "AES-GCM and HKDF, for cached conversations",
}
OWN = {"tie", "kvxfer"}


def imported(statement: str) -> set[str]:
    code = (
        f"import sys; before = set(sys.modules); {statement}; import json; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(result.stdout))


def under(modules: set[str], names: set[str]) -> set[str]:
    return {name for name in names if any(module == name or module.startswith(f"{name}.") for module in modules)}


def test_a_whole_session_imports_nothing_beyond_its_budget():
    modules = imported("import tie.app.main, tie.app.session, tie.app.reuse")
    assert under(modules, FORBIDDEN) == set()
    outside = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names) - OWN
    assert {name for name in outside if not name.startswith("_")} <= ALLOWED.keys()


def test_nothing_before_ready_brings_the_cryptography_library():
    assert under(imported("import tie.app.main, tie.app.session"), {"cryptography"}) == set()


def test_refusing_a_bad_start_costs_none_of_the_libraries_of_a_session():
    modules = imported("import tie.app.main")
    assert under(modules, FORBIDDEN | {"grpc", "tokenizers", "jinja2", "google"}) == set()
