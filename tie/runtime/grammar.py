"""Constrained decoding: llguidance grammars, compiled off the step thread, as bitmasks over the vocabulary.

A hostile grammar costs its own request at most: its text is capped, llguidance's fuel limits bound both compilation and
each mask, whoever waits for a compilation does so with a deadline (`COMPILE_DEADLINE_S`), the compiler has a stack for
the longest chain of references that the cap allows (it recurses along them; an overflow would end the process), and a
panic of the library becomes an error.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import llguidance
import numpy as np
import numpy.typing as npt

COMPILE_DEADLINE_S: Final = 2.0
MAX_GRAMMAR_BYTES: Final = 128 * 1024
_STACK_BYTES: Final = 128 * 1024 * 1024  # address space; memory only as deep as a grammar goes
_WORKERS: Final = 2
_MAX_QUEUED: Final = 64
_START_S: Final = 30.0
# The canary's grammar: any text at all, through the same machinery.
_EMPTY: Final = "start: /(?s:.*)/"

Mask = npt.NDArray[np.int32]


class GrammarError(Exception):
    """The grammar does not compile, is too large, or allows no further token. Carries no text of the grammar."""


class Grammar:
    """One choice's position in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)

    def fork(self) -> "Grammar":
        """An independent copy at the same position: each of n choices walks its own way."""
        with _no_panic():
            return Grammar(self._matcher.deep_copy(), self._words * 32)

    def mask(self) -> Mask:
        """Which tokens may come next: int32 words, bit i of word w is token 32 w + i.

        Raises:
            GrammarError: none may (a dead end), or a limit on the work for one mask was exceeded.
        """
        mask = np.zeros(self._words, dtype=np.int32)
        with _no_panic():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise GrammarError("the grammar is too complex at this point of the answer")
        if not mask.any():
            raise GrammarError("the grammar allows no further token")
        return mask

    def accept(self, token: int) -> None:
        """Moves on by one token.

        Raises:
            GrammarError: the grammar does not allow it here.
        """
        with _no_panic():
            accepted = self._matcher.consume_token(token)
        if not accepted:
            raise GrammarError("the grammar does not allow the chosen token")

    @property
    def complete(self) -> bool:
        """Whether nothing may follow any more."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Compiles grammars on threads of its own.

    Args:
        tokenizer_json: the bundle's tokenizer.json.
        vocab_size: the model's, at least the tokenizer's: the width of the masks.
        end_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(end_ids))
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._workers = _workers_with_deep_stacks()
        self._slots = threading.BoundedSemaphore(_MAX_QUEUED)
        # Made once: a canary never waits behind somebody's grammar.
        self._empty = self._workers.submit(self._compile, _EMPTY).result(_START_S)

    def compile(self, text: str) -> "Future[Grammar]":
        """Starts a compilation. The future raises GrammarError where it fails.

        Args:
            text: a Lark or serialized llguidance grammar; empty for the canary's, which allows any text and is ready.
        """
        if not text:
            ready: Future[Grammar] = Future()
            ready.set_result(self._empty.fork())
            return ready
        if not self._slots.acquire(blocking=False):
            refused: Future[Grammar] = Future()
            refused.set_exception(GrammarError("too many grammars are being compiled"))
            return refused
        future = self._workers.submit(self._compile, text)
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def _compile(self, text: str) -> Grammar:
        if len(text.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"the grammar is larger than {MAX_GRAMMAR_BYTES} bytes")
        with _no_panic():
            matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            # llguidance's own message quotes the grammar.
            raise GrammarError("the grammar does not compile or is too complex")
        return Grammar(matcher, self._vocab_size)

    def close(self) -> None:
        """Ends the threads; compilations that have not begun are dropped."""
        self._workers.shutdown(wait=False, cancel_futures=True)


def _workers_with_deep_stacks() -> ThreadPoolExecutor:
    workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="grammar")
    before = threading.stack_size(_STACK_BYTES)
    try:
        # The pool makes a thread only when none is idle: all meet here, so all are made now, with this size.
        started = threading.Barrier(_WORKERS + 1)
        for _ in range(_WORKERS):
            workers.submit(started.wait, _START_S)
        started.wait(_START_S)
    finally:
        threading.stack_size(before)
    return workers


@contextmanager
def _no_panic() -> Iterator[None]:
    """Turns a Rust panic, which Python sees as a BaseException of its own, into a GrammarError without its text."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise GrammarError("the grammar is more than the compiler can take") from None
