"""A process that does for the runtime what may end whoever does it: trying a grammar out, decoding an image.

It forks for each thing that it is asked, so that none of them can end the process itself.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from tie.runtime import environment

_START_S: Final = 30.0  # for Python and the libraries
_END_S: Final = 2.0


class HelperProcess:
    """The other end of its standard input and output. Started when first needed, and again whenever it fails.

    Of one thread at a time, but for `kill`.

    Args:
        module: what it runs.
        greeting: what it is told first; it answers with a byte.
        variables: more of them for its environment.
    """

    def __init__(self, module: str, greeting: bytes, variables: Mapping[str, str] | None = None) -> None:
        self._module = module
        self._greeting = greeting
        self._variables = variables or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Starts it, if it does not run.

        Raises:
            OSError: it cannot be started, or ends at once.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # The interpreter that runs us, except inside a host that embeds it.
                [os.environ.get(environment.PYTHON) or sys.executable, "-P", "-m", self._module],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,  # a panic of a library would write there what it was about
                env={**os.environ, **self._variables},
            )
        self.send(self._greeting, timeout=_START_S)
        self.answer(timeout=_START_S)

    def send(self, data: bytes, descriptors: Sequence[int] = (), *, timeout: float) -> None:
        """Asks for something.

        Raises:
            ConnectionError: it is gone; another may be started.
            OSError: it does not read, and is ended.
        """
        try:
            connection = self._connection(timeout)
            if descriptors:
                socket.send_fds(connection, [data], descriptors)
            else:
                connection.sendall(data)
        except OSError:
            self.close()
            raise

    def answer(self, *, timeout: float) -> int:
        """The byte that it answers with.

        Raises:
            ConnectionError: it is gone; another may be started.
            OSError: it does not answer, and is ended.
        """
        try:
            said = self._connection(timeout).recv(1)
            if not said:
                raise BrokenPipeError
        except OSError:
            self.close()
            raise
        return said[0]

    def kill(self) -> None:
        """Ends it under the hands of the thread that uses it, which sees that."""
        process = self._process
        if process:
            process.kill()

    def close(self) -> None:
        """Ends it."""
        if self._socket:
            self._socket.close()
        if self._process:
            self._process.kill()
            self._process.wait(_END_S)
        self._socket = self._process = None

    def _connection(self, timeout: float) -> socket.socket:
        if self._socket is None:
            raise BrokenPipeError
        self._socket.settimeout(timeout)
        return self._socket
