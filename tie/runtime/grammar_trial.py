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
import threading
from typing import Any, Final, NoReturn

import llguidance

from tie.daemon.hardening import die_with_parent, protect_process

CPU_S: Final = 0.15  # of work per grammar, many times what the largest schemas in use take
WALL_S: Final = 5.0  # for it, on a machine that is busy with other things
STACK_BYTES: Final = 64 * 1024 * 1024
_NICENESS: Final = 3  # tokens for those who are already served go first
_LENGTH_BYTES: Final = 4
_STDIN, _STDOUT = 0, 1
_END_OF_FILE: Final = 3  # a child's exit status


class Verdict(enum.Enum):
    """What came of a trial, as the byte on standard output."""

    GOOD = b"+"
    REFUSED = b"-"  # does not compile
    OVERDUE = b"!"  # or was the end of the process


def limits() -> Any:
    """The compiler's own limits on the work and the memory for one grammar, and on what its errors quote."""
    return llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=50_000)


def frame(payload: bytes) -> bytes:
    """The payload as a frame."""
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


def main() -> None:
    """Serves one parent until it is gone."""
    die_with_parent(signal.SIGKILL)
    protect_process()
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(_NICENESS)
    vocabulary = json.loads(_read_frame() or b"{}")
    tokenizer = llguidance.LLTokenizer(
        (_read_frame() or b"").decode(), n_vocab=vocabulary["size"], eos_token=vocabulary["end_ids"]
    )
    _answer(Verdict.GOOD)
    while True:
        # It takes milliseconds to fork, so that is done before there is a grammar to wait for it.
        child = os.fork()
        if child == 0:
            _try_one(tokenizer)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _END_OF_FILE:
            return
        if status != 0:
            _answer(Verdict.OVERDUE)


def _try_one(tokenizer: Any) -> NoReturn:
    """Reads one grammar, answers, and is gone; or is gone without an answer."""
    die_with_parent(signal.SIGKILL)
    grammar = _read_frame()
    if grammar is None:
        os._exit(_END_OF_FILE)
    # Both end the process, as nobody handles them: of its own work, and of the time that passes.
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    good = _compiles(tokenizer, grammar.decode("utf-8", "replace"))
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _answer(Verdict.GOOD if good else Verdict.REFUSED)
    os._exit(0)


def _answer(verdict: Verdict) -> None:
    os.write(_STDOUT, verdict.value)


def _read_frame() -> bytes | None:
    """The next frame; None at the end of the file. Reads no byte more: what follows is for another process."""
    head = _read(_LENGTH_BYTES)
    return None if head is None else _read(int.from_bytes(head, "big"))


def _read(count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(_STDIN, count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


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
