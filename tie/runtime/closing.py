"""Brings JSON, an answer or a call in it, to its end before the tokens run out: half a document is worth nothing.

Within the last tokens that an answer may have, the grammar's mask is narrowed to what ends something, wherever it
allows that: a string, an array, an object, the document; next to what leads on without adding anything. Within a string
that may not end yet the model writes on, for it knows best what is still missing; only one of some format is led to
what that must have. Text beside calls, which may end anywhere, is left alone. The answer stays one that the grammar
allows; it is short where it would have been cut off. What the schema itself demands in more tokens than are left is cut
off as before.
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
_FREE: Final = "("  # every string takes it, save one of some format,
_HALFWAY: Final = "@"  # which must have this before it may end, if it is an address
_LEADS: Final = (",", ":", '",', '":', "},", "],", "},{", '","', '":"')


def begins(max_tokens: int) -> int:
    """How many tokens before its last one an answer is brought to its end."""
    return min(_MOST, max_tokens // _SHARE)


class Closing:
    """Which tokens end something, in a vocabulary.

    Args:
        tokenizer: the bundle's.
        end_ids: tokens that end an answer.
        vocab_size: the width of the masks, in tokens.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Iterable[int], vocab_size: int) -> None:
        def tokens(texts: Iterable[str], more: Iterable[int] = ()) -> Mask:
            found = (token for text in texts if (token := tokenizer.token_id(text)) is not None)
            bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
            bits[[token for token in (*found, *more) if token < len(bits)]] = 1
            return np.packbits(bits, bitorder="little").view(np.int32)

        ends = {"".join(some) for count in (1, 2, 3) for some in itertools.product(_ENDS, repeat=count)}
        empty = {start + end for start in ("[]", "{}", '""') for end in ("", *ends)}
        quotes = [text for text in (*ends, *_LEADS) if text.startswith('"')]
        self._end = tokens((), end_ids)
        self._letters, self._free, self._halfway = tokens(_LETTERS), tokens(_FREE), tokens(_HALFWAY)
        self._inside = tokens(quotes)
        self._outside = tokens(ends | empty, end_ids), tokens(_LEADS)

    def narrowed(self, mask: Mask) -> Mask:
        """Of what a mask allows that which is nearest to the end."""
        for level in self._levels(mask):
            some: Mask = mask & level
            if some.any():
                return some
        return mask

    def _levels(self, mask: Mask) -> tuple[Mask, ...]:
        if not _takes(mask, self._letters):
            return self._outside
        if (mask & self._end).any():
            return ()  # no string, but text
        return (self._inside,) if _takes(mask, self._free) else (self._inside, self._halfway)


def _takes(mask: Mask, tokens: Mask) -> bool:
    return bool(tokens.any() and (mask & tokens == tokens).all())
