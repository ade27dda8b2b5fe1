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
        self._held = ""
        self._automaton: ahocorasick.Automaton | None = None
        if stops:
            words = {stop[:length]: False for stop in stops for length in range(1, len(stop) + 1)}
            words.update(dict.fromkeys(stops, True))
            self._automaton = ahocorasick.Automaton()
            for word, complete in words.items():
                self._automaton.add_word(word, (word, complete))
            self._automaton.make_automaton()

    @property
    def hold_bytes(self) -> int:
        """UTF-8 bytes at the end of the text fed so far that could still become a stop string."""
        return len(self._held.encode())

    def feed(self, text: str) -> StopMatch | None:
        """Continues the text; says whether a stop string is complete now."""
        if self._automaton is None or not text:
            return None
        # What is held back is all of the former text that still matters: it is the automaton's state, spelled out. (The
        # library can keep the state itself, but `set` of its iterator reads freed memory as of 2.3.1.)
        window = self._held + text
        held = ""
        for end, (word, complete) in self._automaton.iter(window):
            if complete:
                after = window[end + 1 :]
                return StopMatch(len((after if self._include else word + after).encode()))
            # Longest first at each position, so the first word that ends at the last character is the longest.
            if end == len(window) - 1 and not held:
                held = word
        self._held = held
        return None
