"""Tries a grammar out: does it compile, soon enough, and if not, why not, in words for its author.

The compiler is native code that nothing can interrupt, so it runs on a thread of its own with a deadline. An overdue
one is abandoned with that thread: this process ends with its request, and the thread ends with the process. Its stack
is large because the compiler recurses along chains of references.
"""

import contextlib
import re
import threading
import time
from typing import Final

from tie.app.outcome import RefusalError
from tie.proto import app_pb2

MAX_GRAMMAR_BYTES: Final = 128 * 1024
COMPILE_CPU_S: Final = 0.2  # of the compiler's own work; the largest schemas in use take a tenth of it
COMPILE_WALL_S: Final = 10.0  # the same on a machine that has much else to do
_LOOK_S: Final = 0.02
_STACK_BYTES: Final = 48 * 1024 * 1024  # twice what a chain of references as long as MAX_GRAMMAR_BYTES allows takes
_MAX_REASON: Final = 300
_KEYWORDS: Final = re.compile(r"Unimplemented keys: \[(.*)\]")


def check(text: str, field: str) -> str:
    """Returns `text` if it compiles.

    Args:
        text: Lark, or llguidance's JSON.
        field: which field of the request it comes from.

    Raises:
        RefusalError: GRAMMAR_REFUSED with the reason.
    """
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise _refused(field, f"is over {MAX_GRAMMAR_BYTES} bytes as a grammar")
    import llguidance  # noqa: F401 (30 ms that most requests need not spend, and that are not the grammar's)

    trial = _Trial(text)
    if not trial.wait():
        raise _refused(field, f"takes more than {COMPILE_CPU_S * 1000:.0f} ms to compile: simplify it")
    if trial.error:
        raise _refused(field, _reason(trial.error))
    return text


class _Trial(threading.Thread):
    def __init__(self, text: str) -> None:
        super().__init__(name="grammar", daemon=True)
        self.error = ""
        self._text = text
        self._clock: int | None = None
        self._done = threading.Event()

    def wait(self) -> bool:
        """Starts it; whether it has ended within its time."""
        before = threading.stack_size(_STACK_BYTES)
        try:
            self.start()
        finally:
            threading.stack_size(before)
        began = time.monotonic()
        while not self._done.wait(_LOOK_S):
            if time.monotonic() - began > COMPILE_WALL_S or self._cpu_s() > COMPILE_CPU_S:
                return self._done.is_set()
        return True

    def _cpu_s(self) -> float:
        with contextlib.suppress(OSError):  # it has just ended
            return 0.0 if self._clock is None else time.clock_gettime(self._clock)
        return 0.0

    def run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self.error = _error(self._text)
        except BaseException:  # noqa: BLE001 (a panic of the compiler, whose text may quote the grammar, is none of Exception)
            self.error = "it is more than the compiler can take"
        finally:
            self._done.set()


def _error(text: str) -> str:
    """Why the grammar is of no use; empty where it is."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False)
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=len(_Bytes.tokens))
    matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some limits show only here
    return str(matcher.get_error()) if matcher.is_error() else ""


class _Bytes:
    """The smallest vocabulary there is: whether a grammar compiles does not depend on the model's."""

    tokens: Final = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids: Final = (256,)
    eos_token_id: Final = 256
    bos_token_id: Final = 256

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _reason(error: str) -> str:
    """The compiler's message as a sentence about the field."""
    if keywords := _KEYWORDS.search(error):
        return f"cannot be enforced: {keywords[1].replace(chr(34), '')}"
    if error.startswith("oneOf constraints"):
        return "cannot be enforced: oneOf, as its options are not told apart by a constant; use anyOf"
    message = " ".join(error.split())
    return f"does not compile: {message[:_MAX_REASON]}{'…' if len(message) > _MAX_REASON else ''}"


def _refused(field: str, why: str) -> RefusalError:
    return RefusalError(app_pb2.STATUS_GRAMMAR_REFUSED, f"{field}: {why}")
