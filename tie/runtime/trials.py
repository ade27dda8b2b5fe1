"""The runtime's side of `grammar_trial`: asks whether a grammar compiles in good time."""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from tie.runtime import environment
from tie.runtime.grammar_trial import WALL_S, Verdict, write_frame

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

    def start(self) -> None:
        """Starts the process, so that the first grammar need not wait for it.

        Raises:
            OSError: it cannot be started, or ends at once.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._process = subprocess.Popen(
            # The interpreter that runs us, except inside a host that embeds it.
            [os.environ.get(environment.PYTHON) or sys.executable, "-m", "tie.runtime.grammar_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A panic of the compiler would write there what it was about.
            stderr=subprocess.DEVNULL,
        )
        try:
            self._write(self._vocabulary)
            self._write(self._tokenizer_json)
            self._answer(_START_S)
        except OSError:
            self.close()
            raise

    def passes(self, grammar: str) -> Verdict:
        """What comes of compiling `grammar`. Takes `WALL_S` and a little at most.

        Raises:
            OSError: there is no trial process to be had.
        """
        self.start()
        try:
            self._write(grammar.encode("utf-8", "replace"))
            return self._answer(WALL_S + _GRACE_S)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait(_END_S)
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()

    def _write(self, payload: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            raise BrokenPipeError
        write_frame(self._process.stdin, payload)

    def _answer(self, timeout: float) -> Verdict:
        if self._process is None or self._process.stdout is None:
            raise BrokenPipeError
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise TimeoutError
        byte = os.read(self._process.stdout.fileno(), 1)
        try:
            return Verdict(byte)
        except ValueError:
            raise BrokenPipeError from None
