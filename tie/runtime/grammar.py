"""Constrained decoding: one choice's position in a llguidance grammar, as bitmasks over the vocabulary.

What may come next is computed on a thread of its own from the moment that the last token is known, thus while the
forward pass runs. llguidance gives the GIL back meanwhile, and bounds the work for one mask. Where a grammar allows one
continuation only, its tokens are known without asking the model.
"""

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


class MaskWorkers:
    """Threads that compute what comes next. They outlive the grammars; `close` ends them."""

    def __init__(self, count: int) -> None:
        self._queue: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name="mask", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, grammar: "Grammar") -> None:
        """Has `grammar.compute` called by one of the threads."""
        self._queue.put(grammar)

    def close(self) -> None:
        """Ends the threads, each after what it is at."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (grammar := self._queue.get()) is not None:
            grammar.compute()
            del grammar  # rather than keep a user's grammar until the next one comes


class Grammar:
    """One choice's position in its grammar. Owned by one thread; only what comes next is computed on another.

    Args:
        matcher: llguidance's, at this position.
        vocab_size: the width of the masks, in tokens.
        workers: compute masks.
        may_force: whether looking for forced tokens is known to take no time worth mentioning: it holds the GIL.

    Attributes:
        forces: whether to look for forced tokens, if that may be done.
    """

    def __init__(self, matcher: Any, vocab_size: int, workers: MaskWorkers, *, may_force: bool = False) -> None:
        self.forces = False
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._workers = workers
        self._may_force = may_force
        # A lock and not a future: this is handed over and back for every token of every answer.
        self._computing = threading.Lock()
        self._begun: float | None = None
        self._next: Next | GrammarError | None = None

    def fork(self) -> "Grammar":
        """An independent copy at the same position: each of n choices walks its own way. Before `begin` only."""
        with no_panic():
            return Grammar(self._matcher.deep_copy(), self._words * 32, self._workers, may_force=self._may_force)

    def begin(self) -> None:
        """Starts on what comes next."""
        if self._begun is None:
            self._begun = time.monotonic()
            self._computing.acquire()
            self._workers.submit(self)

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether `forced` and `mask` answer at once, after waiting for at most `timeout` seconds.

        Raises:
            GrammarError: it takes longer than any mask may.
        """
        self.begin()
        if self._next is None and self._computing.acquire(timeout=max(0.0, timeout)):
            self._computing.release()
        if self._next is None and self._begun is not None and time.monotonic() - self._begun >= MASK_DEADLINE_S:
            raise GrammarError("the grammar is too complex at this point of the answer")
        return self._next is not None

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
        if self._begun is not None and not self.ready(MASK_DEADLINE_S):
            # Nobody else may touch the matcher meanwhile.
            raise GrammarError("the grammar is too complex at this point of the answer")
        self._begun = self._next = None
        with no_panic():
            accepted = self._matcher.consume_token(token)
        if not accepted:
            raise GrammarError("the grammar does not allow the chosen token")

    @property
    def complete(self) -> bool:
        """Whether nothing may follow any more."""
        return bool(self._matcher.is_stopped())

    def compute(self) -> None:
        """What a worker does, once for each `begin`."""
        try:
            self._next = self._computed()
        except GrammarError as error:
            self._next = error
        except Exception:  # noqa: BLE001 (the owner must not wait for it forever; the text may quote the grammar)
            self._next = GrammarError("the grammar is more than the compiler can take")
        finally:
            self._computing.release()

    def _known(self) -> Next:
        if not self.ready(MASK_DEADLINE_S) or self._next is None:
            raise GrammarError("the grammar is too complex at this point of the answer")
        if isinstance(self._next, GrammarError):
            raise self._next
        return self._next

    def _computed(self) -> Next:
        with no_panic():
            forced = tuple(self._matcher.compute_ff_tokens()) if self.forces and self._may_force else ()
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
