"""The accepted connection that a per-connection process is started with (sd_listen_fds(3), `Accept=yes`)."""

import os
import socket

from tie.daemon.errors import ConfigError

_FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START


def accepted_connection() -> socket.socket:
    """Takes descriptor 3 as this process's one accepted connection: non-blocking, not inherited by children.

    Raises:
        ConfigError: the process was not started with exactly one connected stream socket.
    """
    # The service manager says whom the descriptor is for, so that a child does not mistake it for its own.
    mine = os.environ.pop("LISTEN_PID", "") == str(os.getpid())
    count = os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    hint = "it is started by its socket unit (Accept=yes) or by `tie up`, one process per connection"
    if not mine or count != "1":
        raise ConfigError("started without an accepted connection", hint=hint)
    try:
        os.set_inheritable(_FIRST_DESCRIPTOR, False)
        connection = socket.socket(fileno=_FIRST_DESCRIPTOR)
        connection.getpeername()
    except OSError as error:
        raise ConfigError("descriptor 3 is not a connected socket", hint=hint) from error
    connection.setblocking(False)
    return connection
