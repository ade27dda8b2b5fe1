"""tie-cloud-app: started for one connection, serves one request, ends.

The connection comes as descriptor 3 (`Accept=yes` socket activation). Everything that the request touches is this
process's memory; it may write no file, leaves no core, and ends without tidying up, because nothing is to be kept.
"""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import sys

from tie.daemon import config as node_config
from tie.daemon import log
from tie.daemon.activation import accepted_connection
from tie.daemon.errors import UserError
from tie.daemon.hardening import protect_process
from tie.daemon.service import EXIT_FAILURE, options, refuse

_NAME = "tie-cloud-app"


def main() -> None:
    """The console script."""
    description = "Serves one request of one accepted connection (descriptor 3, LISTEN_FDS=1), then ends."
    arguments = options(_NAME, description).parse_args()
    _confine()
    try:
        connection = accepted_connection()
        config = node_config.load(arguments.config)
    except UserError as error:
        refuse(_NAME, error)
    try:
        code = asyncio.new_event_loop().run_until_complete(_serve(config, connection))
    except Exception as error:  # noqa: BLE001 (the last line of defence: a traceback may quote the request)
        log.failure("app.failed", error)
        code = EXIT_FAILURE
    # Interpreter shutdown would wait for gRPC's threads, and for a tokenizer still busy with an abandoned prompt.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


def _confine() -> None:
    protect_process()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sys.dont_write_bytecode = True
    gc.disable()  # until everything is loaded: there is no garbage among modules
    # One request on one core: pools of threads per process would only fight one another.
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", GRPC_VERBOSITY="NONE")


async def _serve(config: node_config.NodeConfig, connection: socket.socket) -> int:
    # Here and not above, so that a mistake in the configuration is told without loading half a second of libraries.
    from tie.app.session import Session

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_loop_error)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    return await Session(config, reader, writer, stopping).run()


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    del loop
    error = context.get("exception")
    if isinstance(error, BaseException):
        log.failure("app.task-failed", error)


if __name__ == "__main__":
    main()
