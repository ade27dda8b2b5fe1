"""The listening socket of a server that strangers connect to."""

import socket
from typing import Final

from tie.daemon.errors import ConfigError

# Of the connections, which have them from the listening socket. Peers that vanish without a word are noticed by the
# kernel: where nothing is under way by its probes, else because they do not acknowledge what they were sent.
_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


def listen(host: str, port: int, *, hint: str) -> socket.socket:
    """Listens on TCP.

    Args:
        host: an IPv4 or IPv6 address, or a name.
        port: 0 for any that is free.
        hint: what to do when it is taken.

    Raises:
        ConfigError: the address is in use or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in _OPTIONS:
            listening.setsockopt(level, option, value)
        listening.bind((host, port))
        listening.listen()  # who comes before the server accepts waits for it
    except (OSError, OverflowError, TypeError) as error:  # the last of names that no host can have
        listening.close()
        why = (error.strerror if isinstance(error, OSError) else "") or "no such address"
        raise ConfigError(f"cannot listen on {host}:{port}: {why}", hint=hint) from error
    return listening
