"""The prober child: looks at the hardware whenever the parent asks, and answers with one snapshot.

Started by exec as `python -m gpuhealthd.worker PROVIDER KERNEL_LOG AFTER FD`; AFTER is the last record of the kernel's
log that is known already. The channel is a SOCK_SEQPACKET pair: one byte asks, one JSON message answers. The child ends
when the parent does: the kernel signals it, and the channel reads end-of-file.
"""

import argparse
import os
import signal
import socket
from pathlib import Path

from gpuhealthd.snapshot import Snapshot, encode
from tie.daemon.hardening import die_with_parent, protect_process


class _Provider:
    """Picks the provider by name; importing NVML's binding only where it is wanted."""

    def __init__(self, name: str, kernel_log: Path, after: int) -> None:
        if name == "nvml":
            from gpuhealthd.nvml import NvmlProvider

            self.look = NvmlProvider(kernel_log, after).look
        else:
            from gpuhealthd.cpu import CpuProvider

            self.look = CpuProvider().look


def serve(channel: socket.socket, source: _Provider) -> None:
    """Answers until the parent closes the channel."""
    while channel.recv(1):
        snapshot: Snapshot = source.look()
        channel.sendall(encode(snapshot))


def main() -> None:
    """The child's entry point."""
    parser = argparse.ArgumentParser(prog="gpuhealthd.worker")
    parser.add_argument("provider", choices=("cpu", "nvml"))
    parser.add_argument("kernel_log", type=Path)
    parser.add_argument("after", type=int)
    parser.add_argument("channel", type=int)
    arguments = parser.parse_args()
    die_with_parent(signal.SIGKILL)
    protect_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole group: the parent decides
    with socket.socket(fileno=os.dup(arguments.channel)) as channel:
        os.close(arguments.channel)
        try:
            serve(channel, _Provider(arguments.provider, arguments.kernel_log, arguments.after))
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    main()
