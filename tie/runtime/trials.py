"""The runtime's side of `grammar_trial`: asks whether a grammar compiles in good time."""

import json
from collections.abc import Sequence
from typing import Final

from tie.runtime.grammar_trial import WALL_S, Verdict, frame
from tie.runtime.helper_process import HelperProcess

_GRACE_S: Final = 1.0  # for the trial process itself, beyond the timers of its forks


class Trials:
    """One trial process, started when it is first needed and again whenever it fails. Used by one thread at a time.

    Args:
        tokenizer_json: the bundle's tokenizer.json.
        vocab_size: the model's.
        end_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        vocabulary = json.dumps({"size": vocab_size, "end_ids": list(end_ids)}).encode()
        self.helper = HelperProcess("tie.runtime.grammar_trial", frame(vocabulary) + frame(tokenizer_json.encode()))

    def start(self) -> None:
        """Starts the process, so that the first grammar need not wait for it.

        Raises:
            OSError: it cannot be started, or ends at once.
        """
        self.helper.start()

    def passes(self, grammar: str) -> Verdict:
        """What comes of compiling `grammar`. Takes `WALL_S` and a little at most, and twice that when the process dies.

        Raises:
            OSError: there is no trial process to be had.
        """
        question = frame(grammar.encode("utf-8", "replace"))
        try:
            return self._ask(question)
        except ConnectionError:
            # No grammar can end the process itself, which only forks: somebody did, and the next one answers.
            return self._ask(question)

    def close(self) -> None:
        """Ends the process."""
        self.helper.close()

    def _ask(self, question: bytes) -> Verdict:
        self.helper.start()
        self.helper.send(question, timeout=WALL_S + _GRACE_S)
        try:
            return Verdict(bytes([self.helper.answer(timeout=WALL_S + _GRACE_S)]))
        except ValueError:
            self.helper.close()
            raise BrokenPipeError from None
