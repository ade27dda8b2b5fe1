"""tie-afm-runtime: becomes the container's supervisord, after laying out what its programs need.

One live runtime per run directory: the lock taken here is held by supervisord for its whole life.
"""

import contextlib
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Final, NoReturn

from tie.daemon import config as node_config
from tie.daemon import log, socket_path
from tie.daemon.errors import ConfigError, TieError
from tie.daemon.hardening import own_network
from tie.daemon.service import options, refuse
from tie.runtime import environment, triton_server

# oneDNN, and torch around it, keep what they compiled for each shape of a bfloat16 product, a thousand of them each.
# Batches have very many shapes, so that these were hundreds of megabytes after some hundred requests.
LIBRARY_CACHES: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}

_NAME: Final = "tie-afm-runtime"
_LOOPBACK: Final = "127.0.0.1"
_MEETING_S: Final = 2.0


def main() -> NoReturn:
    """The console script."""
    parser = options(
        _NAME, "Runs the AFM Runtime's processes (Triton with the engine, the status probe) under supervisord."
    )
    try:
        variables = prepare(parser.parse_args().config.resolve())
    except TieError as error:
        refuse(_NAME, error)
    conf = Path(__file__).with_name("supervisord.conf")
    command = [sys.executable, "-P", "-m", "supervisor.supervisord", "-n", "-c", os.fspath(conf)]
    if os.getuid() == 0:
        command += ["-u", "0"]  # stay what we are, without a warning
    os.execve(sys.executable, command, variables)  # noqa: S606


def prepare(config_path: Path) -> dict[str, str]:
    """Locks the run directory, clears what a former runtime left, and lays out Triton's files.

    Returns:
        The environment for supervisord and its programs.

    Raises:
        UserError: the configuration or the installation is not usable, or there is not the GPU that it asks for, or
            several ranks and no network that is theirs alone.
        SocketInUseError: another runtime is live on this run directory.
    """
    config = node_config.load(config_path)
    if config.runtime.executor == "cuda":
        from tie.runtime.executors import require_gpu  # and with it numpy, which others need not wait for here

        require_gpu()
    if config.runtime.ranks > 1:
        _require_meeting_place()
    installation = triton_server.find_installation()
    directory = config.sockets.engine.parent
    lock = socket_path.claim(directory / "runtime")
    os.set_inheritable(lock, True)
    for path in (config.sockets.triton, config.sockets.kv, config.sockets.probe):
        socket_path.prepare_directory(path)
    environment.remove_regions(environment.shm_family(config.run_dir))  # we hold the lock: nobody uses them
    environment.remove_stale_regions()
    if config.sockets.triton.is_socket():
        config.sockets.triton.unlink()
    triton_server.build(directory / "triton", installation)
    instance_id = secrets.token_hex(16)
    log.event("runtime.launched", instance_id=instance_id)
    log_file, log_level = _output()
    return {
        **os.environ,
        environment.CONFIG: str(config_path),
        environment.INSTANCE: instance_id,
        environment.DIRECTORY: str(directory),
        environment.SHM_PREFIX: environment.shm_prefix(config.run_dir, os.getpid(), instance_id),
        environment.SUPERVISOR: str(os.getpid()),  # exec keeps it
        environment.PYTHON: sys.executable,
        environment.LOG_FILE: log_file,
        environment.LOG_LEVEL: log_level,
        environment.SITE: triton_server.site_directories(),
        "LD_LIBRARY_PATH": os.pathsep.join(
            [*map(str, installation.libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        ),
        # How the stub's embedded interpreter finds its standard library.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        **LIBRARY_CACHES,
        "OMP_NUM_THREADS": str(environment.thread_count(config.runtime)),
        # The machine is shared with apps and daemons. Threads that spin while they wait for one that was put off take
        # the very core that it needs: a step of two spinning threads was seen to take ten times as long.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _require_meeting_place() -> None:
    """That ranks can meet on loopback, and that nobody else is there.

    Raises:
        ConfigError: they cannot, or somebody may be.
    """
    if not own_network():
        hint = "allow user namespaces, or give it one: PrivateNetwork=yes, as the unit does (docs/ranks.md)"
        raise ConfigError("several ranks need a network of their own, and this process cannot make one", hint=hint)
    try:
        with (
            socket.create_server((_LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), _MEETING_S),
        ):
            pass
    except OSError as error:
        hint = "under systemd the unit needs the drop-in that docs/ranks.md has"
        raise ConfigError("several ranks need TCP on loopback, which is not allowed here", hint=hint) from error


def _output() -> tuple[str, str]:
    """Where the programs' output goes (supervisord's `stdout_logfile`) and supervisord's own log level.

    A terminal, pipe or file can be opened again by its programs; journald's socket cannot (ENXIO): there supervisord
    itself passes the output on, which it does at level debug.
    """
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/stderr", os.O_WRONLY | os.O_APPEND))
        return "/dev/stderr", "error"
    return "NONE", "debug"


if __name__ == "__main__":
    main()
