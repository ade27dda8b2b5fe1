"""Stop strings over streamed text, across token borders.

One Aho-Corasick automaton per request (Aho and Corasick 1975): every prefix of every stop string is a word of it, so
the longest word that ends at the last character is exactly the text that could still become a stop string, and only
that is held back. The stop string whose end comes first wins; of those that end together, the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import ahocorasick

MAX_STOPS: Final = 64
MAX_STOP_CHARACTERS: Final = 1024


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found.

    Attributes:
        drop_bytes: UTF-8 bytes at the end of all text fed so far that are not part of the answer.
    """

    drop_bytes: int


class StopMatcher:
    """Watches one choice's text. After a match it must not be fed again.

    Args:
        stops: non-empty strings, at most `MAX_STOPS` of at most `MAX_STOP_CHARACTERS` characters (the caller checks).
        include_stop: whether the stop string itself belongs to the answer.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._include = include_stop
        self._hold = 0
        self._fed = 0  # characters
        self._automaton: ahocorasick.Automaton | None = None
        if stops:
            words = {stop[:length]: False for stop in stops for length in range(1, len(stop) + 1)}
            words.update(dict.fromkeys(stops, True))
            self._automaton = ahocorasick.Automaton()
            for word, complete in words.items():
                self._automaton.add_word(word, (word, complete))
            self._automaton.make_automaton()
            self._search = self._automaton.iter("")

    @property
    def hold_bytes(self) -> int:
        """UTF-8 bytes at the end of the text fed so far that could still become a stop string, or are to be dropped."""
        return self._hold

    def feed(self, text: str) -> StopMatch | None:
        """Continues the text; says whether a stop string is complete now."""
        if self._automaton is None or not text:
            return None
        self._search.set(text)  # keeps the automaton's state and the count of characters
        start, self._fed = self._fed, self._fed + len(text)
        held = ""
        for end, (word, complete) in self._search:
            if complete:
                after = text[end + 1 - start :]
                self._hold = len((after if self._include else word + after).encode())
                return StopMatch(self._hold)
            # Longest first at each position, so the first word that ends at the last character is the longest.
            if end == self._fed - 1 and not held:
                held = word
        self._hold = len(held.encode())
        return None
