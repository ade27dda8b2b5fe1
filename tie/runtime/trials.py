"""The runtime's side of `grammar_trial`: asks whether a grammar compiles in good time."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from tie.runtime import environment
from tie.runtime.grammar_trial import WALL_S, Verdict, frame

_START_S: Final = 30.0  # for Python, the library and a large vocabulary
_GRACE_S: Final = 1.0  # for the trial process itself, beyond the timers of its forks
_END_S: Final = 2.0


class Trials:
    """One trial process, started when it is first needed and again whenever it fails. Used by one thread at a time.

    Args:
        tokenizer_json: the bundle's tokenizer.json.
        vocab_size: the model's.
        end_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._vocabulary = json.dumps({"size": vocab_size, "end_ids": list(end_ids)}).encode()
        self._tokenizer_json = tokenizer_json.encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Starts the process, so that the first grammar need not wait for it.

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
                [os.environ.get(environment.PYTHON) or sys.executable, "-P", "-m", "tie.runtime.grammar_trial"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                # A panic of the compiler would write there what it was about.
                stderr=subprocess.DEVNULL,
            )
        self._ask(frame(self._vocabulary) + frame(self._tokenizer_json), _START_S)

    def passes(self, grammar: str) -> Verdict:
        """What comes of compiling `grammar`. Takes `WALL_S` and a little at most, and twice that when the process dies.

        Raises:
            OSError: there is no trial process to be had.
        """
        question = frame(grammar.encode("utf-8", "replace"))
        self.start()
        try:
            return self._ask(question, WALL_S + _GRACE_S)
        except ConnectionError:
            # No grammar can end the process itself, which only forks: somebody did, and the next one answers.
            self.start()
            return self._ask(question, WALL_S + _GRACE_S)

    def close(self) -> None:
        """Ends the process."""
        if self._socket:
            self._socket.close()
        if self._process:
            self._process.kill()
            self._process.wait(_END_S)
        self._socket = self._process = None

    def _ask(self, question: bytes, timeout: float) -> Verdict:
        try:
            if self._socket is None:
                raise BrokenPipeError
            self._socket.settimeout(timeout)
            self._socket.sendall(question)
            return Verdict(self._socket.recv(1))
        except ValueError:
            self.close()
            raise BrokenPipeError from None
        except OSError:
            self.close()
            raise
