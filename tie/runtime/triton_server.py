"""tritonserver: where it is installed, its private model repository and backend directory, its command line.

site-packages may be read-only, and Triton wants the Python backend's stub beside the backend's library, so the pieces
of the installed server are joined by symbolic links.
"""

import ctypes
import importlib.util
import os
import secrets
import shutil
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tie.daemon.config import NodeConfig
from tie.daemon.errors import ConfigError
from tie.runtime import environment

_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"

_CLOSED_PROTOCOLS: Final = (
    "metadata",
    "model-config",
    "model-repository",
    "shared-memory",
    "statistics",
    "trace",
    "logging",
)

_MODEL_CONFIG: Final = """\
name: "afm"
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "request" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "event" data_type: TYPE_UINT8 dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""

# The stub embeds an interpreter that heeds neither PYTHONPATH nor a virtual environment.
_MODEL: Final = f"""\
import os
import site
import sys

known = sys.path[:]
for directory in os.environ["{environment.SITE}"].split(os.pathsep):
    site.addsitedir(directory)
# Before the system's own packages, which may hold another NumPy.
sys.path.sort(key=lambda entry: entry in known and "-packages" in entry)

from tie.runtime.triton_model import TritonPythonModel
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """Where the pieces of the installed Triton server are."""

    server: Path
    backend: Path
    stub: Path
    libraries: tuple[Path, ...]


def find_installation() -> Installation:
    """Finds tritonserver, its Python backend, the stub for this Python, and the libraries they need.

    Raises:
        ConfigError: a piece is missing; the hint says how to get it.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("no Triton server is installed", hint="pip install 'tie-inference[node,triton]'")
    package = Path(next(iter(spec.submodule_search_locations)))
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / _PYTHON / "triton_python_backend_stub"
    if not stub.is_file():
        raise ConfigError(f"the installed Triton has no stub for Python {_PYTHON}", hint="use Python 3.11 or 3.12")
    return Installation(
        server=root / "bin" / "tritonserver",
        backend=root / "backends" / "python",
        stub=stub,
        libraries=(package.parent / "nvidia_pytriton.libs", *_libpython_directory()),
    )


def _libpython_directory() -> tuple[Path, ...]:
    """The directory of the shared libpython that the stub loads; empty when the loader finds it by itself."""
    name = f"libpython{_PYTHON}.so.1.0"
    directory = Path(sysconfig.get_config_var("LIBDIR") or "/nonexistent")
    if (directory / name).exists():
        return (directory,)
    try:
        ctypes.CDLL(name)
    except OSError:
        raise ConfigError(
            f"Triton's Python backend needs the shared library {name}", hint=f"apt-get install libpython{_PYTHON}"
        ) from None
    return ()


def build(directory: Path, installation: Installation) -> None:
    """Writes `models/` and `backends/` into `directory`, replacing what a former start left there."""
    shutil.rmtree(directory, ignore_errors=True)
    version = directory / "models" / "afm" / "1"
    version.mkdir(parents=True, mode=0o700)
    (version.parent / "config.pbtxt").write_text(_MODEL_CONFIG)
    (version / "model.py").write_text(_MODEL)
    backend = directory / "backends" / "python"
    backend.mkdir(parents=True)
    for source in (*installation.backend.glob("*.so"), *installation.backend.glob("*.py"), installation.stub):
        (backend / source.name).symlink_to(source)


def command(config: NodeConfig, directory: Path) -> list[str]:
    """The command line: gRPC on a Unix socket, for inference and health only.

    Args:
        config: the node's.
        directory: the container's private one.
    """
    # gRPC appends the port to the path.
    address, _, port = os.fspath(config.sockets.triton).rpartition(":")
    # Protocols that need a header whose value nobody is told: closed.
    token = secrets.token_hex(32)
    return [
        os.fspath(find_installation().server),
        f"--model-repository={directory / 'triton' / 'models'}",
        f"--backend-directory={directory / 'triton' / 'backends'}",
        "--model-control-mode=none",
        # Completing the configuration would load the model (torch and all) once more, in a stub of its own.
        "--disable-auto-complete-config",
        f"--grpc-address=unix:{address}",
        f"--grpc-port={port}",
        f"--grpc-restricted-protocol={','.join(_CLOSED_PROTOCOLS)}:closed={token}",
        "--allow-http=false",
        "--allow-metrics=false",
        "--log-info=false",
        "--log-verbose=0",
        "--exit-timeout-secs=3",
        "--pinned-memory-pool-byte-size=0",
        f"--backend-config=python,shm-region-prefix-name={os.environ[environment.SHM_PREFIX]}",
        f"--backend-config=python,stub-timeout-seconds={int(config.probe.start_deadline_s) + 30}",
    ]


def site_directories() -> str:
    """For `environment.SITE`: where this interpreter finds its packages."""
    return os.pathsep.join(path for path in site.getsitepackages() if Path(path).is_dir())
