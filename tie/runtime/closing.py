"""Brings a JSON answer to its end before its tokens run out: half a document is worth nothing to whom it was promised.

Within the last tokens that an answer may have, the grammar's mask is narrowed to what ends something, wherever it
allows that: a string, an array, an object, the document; next to what leads on without adding anything. The answer
stays one that the grammar allows; it is short where it would have been cut off. What the schema itself demands in more
tokens than are left is cut off as before.
"""

import itertools
from collections.abc import Iterable
from typing import Final

import numpy as np

from tie.assets.tokenizer import Tokenizer
from tie.runtime.grammar import Mask

_MOST: Final = 256  # tokens before the end,
_SHARE: Final = 3  # of so many of an answer one, from where on it is brought to its end
_ENDS: Final = '"]}'
_LETTERS: Final = "akzQ"  # where all of these may come, it is within a string, and what looks like an end is none
_HALFWAY: Final = ("@",)  # what a string of some format must have before it may end
_LEADS: Final = (",", ":", '",', '":', "},", "],", "},{", '","', '":"')


def begins(max_tokens: int) -> int:
    """How many tokens before its last one an answer is brought to its end."""
    return min(_MOST, max_tokens // _SHARE)


class Closing:
    """Which tokens end something, in a vocabulary.

    Args:
        tokenizer: the bundle's.
        end_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Iterable[int]) -> None:
        ends = {"".join(some) for count in (1, 2, 3) for some in itertools.product(_ENDS, repeat=count)}
        empty = {start + end for start in ("[]", "{}", '""') for end in ("", *ends)}
        quotes = [text for text in (*ends, *_LEADS) if text.startswith('"')]
        self._letters = _ids(tokenizer, _LETTERS)
        self._between = [{*end_ids, *_ids(tokenizer, ends | empty)}, _ids(tokenizer, _LEADS)]
        self._within = [_ids(tokenizer, quotes), _ids(tokenizer, _HALFWAY)]
        self._masks: dict[str, list[Mask]] = {}

    def narrowed(self, mask: Mask) -> Mask:
        """Of what a mask allows that which is nearest to the end."""
        if not self._masks:
            for name, levels in (("letters", [self._letters]), ("between", self._between), ("within", self._within)):
                self._masks[name] = [_bits(ids, len(mask)) for ids in levels]
        (letters,) = self._masks["letters"]
        within = bool(letters.any()) and bool((mask & letters == letters).all())
        for level in self._masks["within" if within else "between"]:
            some: Mask = mask & level
            if some.any():
                return some
        return mask


def _ids(tokenizer: Tokenizer, texts: Iterable[str]) -> set[int]:
    return {token for text in texts if (token := tokenizer.token_id(text)) is not None}


def _bits(ids: Iterable[int], words: int) -> Mask:
    bits = np.zeros(32 * words, dtype=np.uint8)
    bits[[token for token in ids if token < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
