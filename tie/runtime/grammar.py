"""Constrained decoding: one choice's position in a llguidance grammar, as bitmasks over the vocabulary.

What may come next is computed on a thread of its own from the moment that the last token is known, thus while the
forward pass runs. llguidance gives the GIL back meanwhile, and bounds the work for one mask. Where a grammar allows one
continuation only, its tokens are known without asking the model.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MASK_DEADLINE_S: Final = 5.0  # ten times what llguidance's limits let one mask take

Mask = npt.NDArray[np.int32]


class GrammarError(Exception):
    """The grammar does not compile, is too large, or allows no further token. Carries no text of the grammar."""


@dataclass(frozen=True, slots=True)
class Next:
    """What may follow a position: the one continuation there is, or else any token of a mask.

    Attributes:
        forced: tokens, as the tokenizer would write them.
        mask: int32 words, bit i of word w is token 32 w + i; None where there are forced tokens.
    """

    forced: tuple[int, ...]
    mask: Mask | None


class Grammar:
    """One choice's position in its grammar. Owned by one thread; only what comes next is computed on another.

    Args:
        matcher: llguidance's, at this position.
        vocab_size: the width of the masks, in tokens.
        workers: compute masks.

    Attributes:
        forces: whether to look for forced tokens.
    """

    def __init__(self, matcher: Any, vocab_size: int, workers: ThreadPoolExecutor) -> None:
        self.forces = False
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._workers = workers
        self._next: Future[Next] | None = None
        self._begun = 0.0

    def fork(self) -> "Grammar":
        """An independent copy at the same position: each of n choices walks its own way. Before `begin` only."""
        with no_panic():
            return Grammar(self._matcher.deep_copy(), self._words * 32, self._workers)

    def begin(self) -> "Future[Next]":
        """Starts on what comes next."""
        if self._next is None:
            self._begun = time.monotonic()
            self._next = self._workers.submit(self._compute)
        return self._next

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether `forced` and `mask` answer at once, after waiting for at most `timeout` seconds.

        Raises:
            GrammarError: it takes longer than any mask may.
        """
        if self.begin().done() or wait([self.begin()], timeout).done:
            return True
        if time.monotonic() - self._begun >= MASK_DEADLINE_S:
            raise GrammarError("the grammar is too complex at this point of the answer")
        return False

    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next; mostly none. Does not move on.

        Raises:
            GrammarError: as `mask`.
        """
        return self._known().forced

    def mask(self) -> Mask | None:
        """Which tokens may come next; None where some are forced.

        Raises:
            GrammarError: none may (a dead end), or a limit on the work for one mask was exceeded.
        """
        return self._known().mask

    def accept(self, token: int) -> None:
        """Moves on by one token.

        Raises:
            GrammarError: the grammar does not allow it here.
        """
        if self._next and not self._next.done():
            self._known()  # nobody else may touch the matcher meanwhile
        self._next = None
        with no_panic():
            accepted = self._matcher.consume_token(token)
        if not accepted:
            raise GrammarError("the grammar does not allow the chosen token")

    @property
    def complete(self) -> bool:
        """Whether nothing may follow any more."""
        return bool(self._matcher.is_stopped())

    def _known(self) -> Next:
        try:
            return self.begin().result(MASK_DEADLINE_S)
        except TimeoutError:
            raise GrammarError("the grammar is too complex at this point of the answer") from None

    def _compute(self) -> Next:
        with no_panic():
            forced = tuple(self._matcher.compute_ff_tokens()) if self.forces else ()
            if forced:
                return Next(forced, None)
            mask = np.zeros(self._words, dtype=np.int32)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise GrammarError("the grammar is too complex at this point of the answer")
        if not mask.any():
            raise GrammarError("the grammar allows no further token")
        return Next((), mask)


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
