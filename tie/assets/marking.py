"""Keeps a user's text apart from a template's while both go through one rendering.

What a user wrote must never become a control token (`<|im_end|>`). So every control token inside a message is put
between marks before rendering: a string of private-use characters, drawn at random for each rendering, which no text
contains by accident or on purpose. A text that begins or ends with a part of a control token gets a mark there, lest
a neighbour complete it. After rendering, control tokens outside marks are the template's own; everything between them
is encoded as plain text.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tie.assets.tokenizer import Tokenizer

_MARK_LENGTH: Final = 12  # of 6400 private-use characters: over 150 random bits
_PRIVATE_USE: Final = range(0xE000, 0xF900)
_NOT_WORD: Final = re.compile(r"\W")


class Marker:
    """The marks of one tokenizer's control tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Longest first: a token takes priority over one that it contains.
        self._tokens = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._tokenizer = tokenizer
        self._pattern = "|".join(map(re.escape, self._tokens)) or r"(?!)"
        self._control = re.compile(self._pattern)
        cuts = [(token, cut) for token in self._tokens for cut in range(1, len(token))]
        self._starts = frozenset(token[:cut] for token, cut in cuts if _NOT_WORD.search(token[:cut]))
        self._ends = frozenset(token[cut:] for token, cut in cuts if _NOT_WORD.search(token[cut:]))
        self._longest = len(self._tokens[0]) if self._tokens else 0

    @staticmethod
    def new_mark() -> str:
        """A mark for one rendering."""
        return "".join(chr(secrets.choice(_PRIVATE_USE)) for _ in range(_MARK_LENGTH))

    def mark(self, text: str, mark: str, *, words: bool = False) -> str:
        """The text with marks where it could make a control token; mostly the text itself.

        Args:
            text: what a user wrote.
            mark: of this rendering.
            words: mark a text too that is a word out of a control token ("user" for `<|user|>`). Only right for
                texts that no template compares with anything.
        """
        core = text.strip()  # templates trim; a mark outside the spaces would hinder them
        if not core:
            return text
        lengths = range(1, min(self._longest, len(core) + 1))
        inside = words and len(core) < self._longest and any(core in token for token in self._tokens)
        before = mark if inside or any(core[:length] in self._ends for length in lengths) else ""
        after = mark if inside or any(core[-length:] in self._starts for length in lengths) else ""
        inner = self._control.sub(lambda found: f"{mark}{found[0]}{mark}", core)
        return text.replace(core, f"{before}{inner}{after}", 1) if before or after or inner != core else text

    def mark_tree(self, value: Any, mark: str) -> Any:
        """`mark` for all strings in JSON-like data, keys included."""
        if isinstance(value, str):
            return self.mark(value, mark)
        if isinstance(value, Mapping):
            return {self.mark(key, mark): self.mark_tree(item, mark) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.mark_tree(item, mark) for item in value]
        return value

    def encode(self, rendered: str, mark: str) -> list[int]:
        """Token ids of a rendering: control tokens outside marks as such, everything else as plain text."""
        # A template that asks tojson for ASCII writes the marks as escapes.
        rendered = rendered.replace(json.dumps(mark)[1:-1], mark)
        plain = rendered.replace(mark, "")
        if plain == rendered:
            return self._tokenizer.encode(plain, special=True)
        # A template's string methods can part the two marks of a token: a lone mark just breaks the text.
        quoted = re.compile(f"{mark}(?P<user>{self._pattern}){mark}|{mark}|(?P<own>{self._pattern})")
        found = list(quoted.finditer(rendered))
        if _own_spans(found, mark) == [match.span() for match in self._control.finditer(plain)]:
            # Marked in vain: all control tokens are the template's, and the library knows best how they swallow spaces.
            return self._tokenizer.encode(plain, special=True)
        ids: list[int] = []
        pending: list[str] = []
        position = 0
        for match in found:
            pending.append(rendered[position : match.start()])
            position = match.end()
            if match["own"]:
                ids += self._tokenizer.encode("".join(pending))
                ids.append(self._tokenizer.control_tokens[match["own"]])
                pending.clear()
            elif match["user"]:
                pending.append(match["user"])
        pending.append(rendered[position:])
        return ids + self._tokenizer.encode("".join(pending))


def _own_spans(found: Sequence[re.Match[str]], mark: str) -> list[tuple[int, int]]:
    """Where the template's own control tokens lie once the marks are gone."""
    spans: list[tuple[int, int]] = []
    removed = 0
    for match in found:
        if match["own"]:
            spans.append((match.start() - removed, match.end() - removed))
        else:
            removed += len(mark) * (2 if match["user"] else 1)
    return spans
