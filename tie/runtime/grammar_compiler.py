"""Compiles grammars off the step thread, each only after a trial in a process that may die of it.

A hostile grammar costs its own request at most. Its text is capped; a trial (`grammar_trial`) shows that it compiles
within its time, its memory and its stack; only then is it compiled here, where nothing could interrupt it. However many
come at once, there are `_WORKERS` compilations at a time and `_MAX_QUEUED` that wait, and each wait has a deadline.

Compiled grammars are not kept for the next request that brings the same text: a schema is user data, and how fast it
compiles would tell one user what another one asked.
"""

import contextlib
import json
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

import llguidance

from tie.daemon import log
from tie.runtime.grammar import Grammar, GrammarError, MaskWorkers, deep_workers, no_panic
from tie.runtime.grammar_trial import STACK_BYTES, Verdict, limits
from tie.runtime.trials import Trials

COMPILE_DEADLINE_S: Final = 10.0  # nearly all of it is waiting: for others' grammars, and for the processor
MAX_GRAMMAR_BYTES: Final = 128 * 1024
_WORKERS: Final = 2
_MAX_QUEUED: Final = 64
_MASK_WORKERS: Final = 4
_START_S: Final = 30.0
_NICENESS: Final = 3
FREE_WHITE_SPACE: Final = r"[ \t]{0,4}(\r?\n[ \t]{0,64})?"  # as tie-cloud-app writes it
_MAX_FORCING_BYTES: Final = 8 * 1024  # milliseconds, at the worst
_PATTERNS: Final = {"pattern", "patternProperties", "minLength"}
# The canary's grammar: any text at all, through the same machinery.
_EMPTY: Final = "start: /(?s:.*)/"


class CompilerBusyError(GrammarError):
    """Not the grammar's fault: it may be tried again."""


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
        # Deeper than the stack of a trial: what passes there does not overflow here.
        self._workers = deep_workers(_WORKERS, "grammar", 2 * STACK_BYTES, _START_S)
        self._masks = MaskWorkers(_MASK_WORKERS)
        self._slots = threading.BoundedSemaphore(_MAX_QUEUED)
        self._trials = [Trials(tokenizer_json, vocab_size, end_ids) for _ in range(_WORKERS)]
        self._idle: queue.SimpleQueue[Trials] = queue.SimpleQueue()
        for trials in self._trials:
            self._idle.put(trials)
        # Made once: a canary never waits behind somebody's grammar.
        self._empty = self._workers.submit(self._build, _EMPTY).result(_START_S)
        for _ in range(_WORKERS):
            self._workers.submit(self._warm)

    def compile(self, text: str) -> "Future[Grammar]":
        """Starts a compilation. The future raises GrammarError, or CompilerBusyError where it cannot begin.

        Args:
            text: a Lark or serialized llguidance grammar; empty for the canary's, which allows any text and is ready.
        """
        if not text:
            ready: Future[Grammar] = Future()
            ready.set_result(self._empty.fork())
            return ready
        if not self._slots.acquire(blocking=False):
            refused: Future[Grammar] = Future()
            refused.set_exception(CompilerBusyError("too many grammars are being compiled"))
            return refused
        future = self._workers.submit(self._compile, text)
        future.add_done_callback(lambda _: self._slots.release())
        return future

    def close(self) -> None:
        """Ends the threads and the trial processes; compilations that have not begun are dropped."""
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._masks.close()
        for trials in self._trials:
            trials.close()

    def _warm(self) -> None:
        """Starts a trial process, so that the first grammar does not wait for it."""
        with contextlib.suppress(OSError):  # tokens for those who are already served go first, where that may be said
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        trials = self._idle.get_nowait()
        try:
            trials.start()
        except OSError as error:
            log.failure("grammar.no-trials", error)  # tried again with the first grammar
        finally:
            self._idle.put(trials)

    def _compile(self, text: str) -> Grammar:
        if len(text.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"the grammar is larger than {MAX_GRAMMAR_BYTES} bytes")
        trials = self._idle.get_nowait()  # one for each worker
        try:
            verdict = trials.passes(text)
        except OSError as error:
            log.failure("grammar.no-trials", error)
            raise CompilerBusyError("grammars cannot be compiled now") from None
        finally:
            self._idle.put(trials)
        if verdict is Verdict.OVERDUE:
            raise GrammarError("the grammar takes too long to compile")
        if verdict is Verdict.REFUSED:
            raise GrammarError("the grammar does not compile or is too complex")
        return self._build(text)

    def _build(self, text: str) -> Grammar:
        with no_panic():
            matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits())
        if matcher.is_error():
            # llguidance's own message quotes the grammar.
            raise GrammarError("the grammar does not compile or is too complex")
        return Grammar(matcher, self._vocab_size, self._masks, may_force=forces_briefly(text, json_schema(text)))


def json_schema(text: str) -> Any:
    """The JSON schema that a serialized grammar consists of, or None where it is another grammar."""
    try:
        (part,) = json.loads(text)["grammars"]
        return part["json_schema"] if part.keys() == {"json_schema"} else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def forces_briefly(text: str, schema: Any) -> bool:
    """Whether what the grammar `text`, which consists of `schema`, forces is never long.

    Looking for it takes time in proportion, up to a second for a few bytes of a hostile grammar, and the GIL. In JSON
    with free white space it ends with a string or a number, so it is no longer than one in the text of the schema,
    unless a pattern repeats something.
    """
    free = {"whitespace_flexible": True, "whitespace_pattern": FREE_WHITE_SPACE}
    if len(text) > _MAX_FORCING_BYTES or not isinstance(schema, dict) or schema.get("x-guidance") != free:
        return False
    return not _PATTERNS & _keys(schema)


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_keys, value.values()))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()
