"""Finds the calls in what a model writes, while it writes.

Models say a call as `{"name": …, "arguments": {…}}`: between `<tool_call>` and `</tool_call>`, as the templates of
Hermes and Qwen teach, or as their whole answer, as Llama's does (which says "parameters"). What only looks like one
stays text.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

_OPENING: Final = "<tool_call>"
_CLOSING: Final = "</tool_call>"
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_HEAD_BEGINS: Final = '{"name":"'
_MAX_HEAD: Final = 512  # characters; the longest that anybody means has a fifth of it
_TAGGED_TAIL: Final = re.compile(rf"\s*\}}\s*{_CLOSING}")
_BARE_TAIL: Final = re.compile(r"\s*\}")
_MAX_TAIL: Final = 64


@dataclass(frozen=True)
class Text:
    """What is no call."""

    text: str


@dataclass(frozen=True)
class Begun:
    """A call begins.

    Attributes:
        number: 0 for the answer's first.
        name: of the tool, which is one of those that were offered.
    """

    number: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of a call's arguments; all of them together are one JSON object, unless the answer was cut."""

    number: int
    text: str


Event = Text | Begun | Arguments


class CallReader:
    """Reads one answer.

    Attributes:
        count: of calls so far.

    Args:
        names: of the tools that were offered.
        single: whether what follows the first call is dropped.
    """

    def __init__(self, names: Collection[str], *, single: bool = False) -> None:
        self.count = 0
        self._names = names
        self._single = single
        self._buffer = ""
        self._final = False
        self._events: list[Event] = []
        self._tagged = False
        self._depth = 0
        self._quoted = self._escaped = False
        self._step: Callable[[], bool] = self._beginning

    def feed(self, text: str) -> list[Event]:
        """Takes the answer's next piece."""
        self._buffer += text
        return self._drain()

    def finish(self) -> list[Event]:
        """The answer is over."""
        self._final = True
        return self._drain()

    def _drain(self) -> list[Event]:
        while self._step():
            continue
        events, self._events = self._events, []
        return events

    # The states. Each takes from the buffer what it can, and says whether another step may follow.

    def _beginning(self) -> bool:
        """Nothing but spaces yet: is the whole answer a call?"""
        stripped = self._buffer.lstrip()
        if not stripped and not self._final:
            return False
        self._tagged = False
        self._step = self._head if stripped.startswith("{") else self._text
        return True

    def _text(self) -> bool:
        before, tag, after = self._buffer.partition(_OPENING)
        if tag:
            self._say(before.rstrip())
            self._buffer, self._tagged, self._step = after, True, self._head
            return True
        kept = 0 if self._final else _unsure(before)
        text, self._buffer = before[: len(before) - kept], before[len(before) - kept :]
        self._say(text.rstrip() if self._final and self.count else text)
        return False

    def _head(self) -> bool:
        head = _HEAD.match(self._buffer)
        if head and head[1] in self._names:
            self._events.append(Begun(self.count, head[1]))
            self._buffer, self._step = self._buffer[head.end() :], self._arguments
            self._depth, self._quoted, self._escaped = 0, False, False
            return True
        squeezed = "".join(self._buffer.split())[: len(_HEAD_BEGINS)]
        hopeless = head or self._final or len(self._buffer) > _MAX_HEAD or not _HEAD_BEGINS.startswith(squeezed)
        if hopeless:
            self._say(_OPENING if self._tagged else "")
            self._step = self._text
        return bool(hopeless)

    def _arguments(self) -> bool:
        for position, character in enumerate(self._buffer):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._argue(position + 1)
                    self._step = self._tail
                    self.count += 1
                    return True
        self._argue(len(self._buffer))
        return False

    def _tail(self) -> bool:
        tail = (_TAGGED_TAIL if self._tagged else _BARE_TAIL).match(self._buffer)
        if not tail and not self._final and len(self._buffer) <= _MAX_TAIL:
            return False
        self._buffer = self._buffer[tail.end() :] if tail else self._buffer
        self._step = self._nothing if self._single else self._between
        return True

    def _between(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._step = self._text
        return bool(self._buffer)

    def _nothing(self) -> bool:
        self._buffer = ""
        return False

    def _argue(self, size: int) -> None:
        if size:
            self._events.append(Arguments(self.count, self._buffer[:size]))
        self._buffer = self._buffer[size:]

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Text(text))


def _unsure(text: str) -> int:
    """How many characters at the end may belong to a call: spaces, and the beginning of its tag."""
    for size in range(min(len(_OPENING) - 1, len(text)), 0, -1):
        if _OPENING.startswith(text[-size:]):
            break
    else:
        size = 0
    body = text[: len(text) - size]
    return size + len(body) - len(body.rstrip())
