"""sd_notify: one datagram to `$NOTIFY_SOCKET` (systemd's sd_notify(3)). Does nothing without systemd."""

import os
import socket


def notify(*assignments: str) -> None:
    """Sends assignments such as "READY=1" or "WATCHDOG=1"."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as client:
        client.settimeout(1.0)
        try:
            client.sendto("\n".join(assignments).encode(), address)
        except OSError:
            # systemd restarts a daemon whose watchdog stays silent; failing here as well would only hide the reason.
            return


def watchdog_interval() -> float | None:
    """Seconds between two "WATCHDOG=1" (half of what systemd allows), or None without a watchdog."""
    micros = os.environ.get("WATCHDOG_USEC")
    return int(micros) / 2_000_000 if micros else None
