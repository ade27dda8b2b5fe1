"""Connections that start a process ahead of need: whoever starts it can tell, and let it stand back.

A socket that starts one process for each connection does so before a byte has come. Yet it matters for whom: what
stands by later must not hold up what serves now, and what a user already waits for must not wait behind everything
else. It cannot be changed afterwards, since raising a priority needs a privilege (setpriority(2)). So it is told by the
one thing that is there with a connection, the name of its other side: an abstract one (unix(7)), which leads nowhere.
"""

import asyncio
import contextlib
import secrets
import socket
from pathlib import Path
from typing import Final

_PREFIX: Final = b"\0tie-ahead-of-need."
_RANDOM_BYTES: Final = 16


async def connect(path: Path, *, ahead: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to `path`; `ahead` says that nobody waits for the process which that starts.

    Raises:
        OSError: it cannot be connected to.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if ahead:
            with contextlib.suppress(OSError):  # where it may have no name it is one of those that are waited for
                connection.bind(_PREFIX + secrets.token_hex(_RANDOM_BYTES).encode())
        await asyncio.get_running_loop().sock_connect(connection, str(path))
        return await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise


def is_ahead(connection: socket.socket) -> bool:
    """Whether nobody waits yet for the process that this accepted connection starts."""
    try:
        name = connection.getpeername()
    except OSError:
        return False  # it has gone: the process will end by itself
    return isinstance(name, bytes) and name.startswith(_PREFIX)
