"""Constrained decoding: one choice's position in a llguidance grammar, as bitmasks over the vocabulary.

The mask for the next token is computed on a thread of its own from the moment that the last token is known, thus while
the forward pass runs. llguidance gives the GIL back meanwhile, and bounds the work for one mask. Where a grammar allows
one continuation only, its tokens are known without asking the model (`forced`).
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MASK_DEADLINE_S: Final = 5.0  # ten times what llguidance's limits let one mask take

Mask = npt.NDArray[np.int32]


class GrammarError(Exception):
    """The grammar does not compile, is too large, or allows no further token. Carries no text of the grammar."""


class Grammar:
    """One choice's position in its grammar. Owned by one thread; only the mask is computed on another.

    Args:
        matcher: llguidance's, at this position.
        vocab_size: the width of the masks, in tokens.
        workers: compute masks.
    """

    def __init__(self, matcher: Any, vocab_size: int, workers: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._workers = workers
        self._mask: Future[Mask] | None = None
        self._begun = 0.0

    def fork(self) -> "Grammar":
        """An independent copy at the same position: each of n choices walks its own way. Before `begin` only."""
        with no_panic():
            return Grammar(self._matcher.deep_copy(), self._words * 32, self._workers)

    def begin(self) -> "Future[Mask]":
        """Starts on the mask for the next token."""
        if self._mask is None:
            self._begun = time.monotonic()
            self._mask = self._workers.submit(self._compute)
        return self._mask

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether `mask` answers at once, after waiting for at most `timeout` seconds.

        Raises:
            GrammarError: the mask takes longer than any mask may.
        """
        if wait([self.begin()], timeout).done:
            return True
        if time.monotonic() - self._begun >= MASK_DEADLINE_S:
            raise GrammarError("the grammar is too complex at this point of the answer")
        return False

    def mask(self) -> Mask:
        """Which tokens may come next: int32 words, bit i of word w is token 32 w + i.

        Raises:
            GrammarError: none may (a dead end), or a limit on the work for one mask was exceeded.
        """
        try:
            return self.begin().result(MASK_DEADLINE_S)
        except TimeoutError:
            raise GrammarError("the grammar is too complex at this point of the answer") from None

    def accept(self, token: int) -> None:
        """Moves on by one token.

        Raises:
            GrammarError: the grammar does not allow it here.
        """
        if self._mask and not self._mask.done():
            self.mask()  # nobody else may touch the matcher meanwhile
        self._mask = None
        with no_panic():
            accepted = self._matcher.consume_token(token)
        if not accepted:
            raise GrammarError("the grammar does not allow the chosen token")

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer would write them; mostly none. Does not move on."""
        if self._mask:
            return []  # the model was asked already
        with no_panic():
            return list(self._matcher.compute_ff_tokens())

    @property
    def complete(self) -> bool:
        """Whether nothing may follow any more."""
        return bool(self._matcher.is_stopped())

    def _compute(self) -> Mask:
        mask = np.zeros(self._words, dtype=np.int32)
        with no_panic():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise GrammarError("the grammar is too complex at this point of the answer")
        if not mask.any():
            raise GrammarError("the grammar allows no further token")
        return mask


@contextmanager
def no_panic() -> Iterator[None]:
    """Turns a Rust panic, which Python sees as a BaseException of its own, into a GrammarError without its text."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise GrammarError("the grammar is more than the compiler can take") from None


def deep_workers(count: int, name: str, stack_bytes: int, timeout: float) -> ThreadPoolExecutor:
    """A pool whose threads are all there already, each with a stack of `stack_bytes` of address space."""
    workers = ThreadPoolExecutor(count, thread_name_prefix=name)
    before = threading.stack_size(stack_bytes)
    try:
        # The pool makes a thread only when none is idle: all meet here, so all are made now, with this size.
        started = threading.Barrier(count + 1)
        for _ in range(count):
            workers.submit(started.wait, timeout)
        started.wait(timeout)
    finally:
        threading.stack_size(before)
    return workers
