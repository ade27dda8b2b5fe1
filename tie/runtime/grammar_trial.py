"""A process that tries grammars out before the runtime compiles them: `python -m tie.runtime.grammar_trial`.

llguidance cannot be interrupted, recurses along chains of references, and a few hundred bytes of schema can keep it
busy for seconds. So each grammar is first compiled in a fork of this process that holds nothing else: the kernel ends
it by a timer, and where it runs out of stack nobody else does.

On standard input, frames of a 4-byte big-endian length and that many bytes: the vocabulary's size and end tokens as
JSON, the tokenizer.json, and then one grammar after the other. On standard output, one byte for the tokenizer and for
each grammar: a `Verdict`. End of file ends the process.
"""

import contextlib
import enum
import json
import os
import signal
import sys
import threading
from typing import IO, Any, Final

import llguidance

from tie.daemon.hardening import die_with_parent, protect_process

CPU_S: Final = 0.1  # of work per grammar, five times what the largest schemas in use take
WALL_S: Final = 1.0  # for it, on a machine that is busy with tokens
STACK_BYTES: Final = 64 * 1024 * 1024
_NICENESS: Final = 5  # tokens for those who are already served go first
_LENGTH_BYTES: Final = 4


class Verdict(enum.Enum):
    """What came of a trial, as the byte on standard output."""

    GOOD = b"+"
    REFUSED = b"-"  # does not compile
    OVERDUE = b"!"  # or was the end of the process


def limits() -> Any:
    """The compiler's own limits on the work and the memory for one grammar, and on what its errors quote."""
    return llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=50_000)


def write_frame(stream: IO[bytes], payload: bytes) -> None:
    """Sends one frame.

    Raises:
        OSError: the other side is gone.
    """
    stream.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)
    stream.flush()


def main() -> None:
    """Serves one parent until it is gone."""
    die_with_parent(signal.SIGKILL)
    protect_process()
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(_NICENESS)
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = json.loads(_read_frame(source) or b"{}")
    tokenizer = llguidance.LLTokenizer(
        (_read_frame(source) or b"").decode(), n_vocab=vocabulary["size"], eos_token=vocabulary["end_ids"]
    )
    verdict = Verdict.GOOD
    while True:
        answers.write(verdict.value)
        answers.flush()
        grammar = _read_frame(source)
        if grammar is None:
            return
        verdict = _forked(tokenizer, grammar)


def _read_frame(stream: IO[bytes]) -> bytes | None:
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    body = stream.read(int.from_bytes(head, "big"))
    return body if len(body) == int.from_bytes(head, "big") else None


def _forked(tokenizer: Any, grammar: bytes) -> Verdict:
    child = os.fork()
    if child == 0:
        # Both end the process where nobody handles them: of its own work, and of the time that passes.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        die_with_parent(signal.SIGKILL)
        os._exit(0 if _compiles(tokenizer, grammar.decode("utf-8", "replace")) else 1)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        return Verdict.GOOD if os.WEXITSTATUS(status) == 0 else Verdict.REFUSED
    return Verdict.OVERDUE


def _compiles(tokenizer: Any, grammar: str) -> bool:
    """Whether it does, and gives a first mask."""
    matchers: list[Any] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(
        target=lambda: matchers.append(llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits()))
    )
    thread.start()
    thread.join()
    if not matchers or matchers[0].is_error():
        return False
    matcher = matchers[0].deep_copy()
    matcher.compute_bitmask()  # on a stack such as the runtime's threads have for that
    return not matcher.is_error()


if __name__ == "__main__":
    main()
