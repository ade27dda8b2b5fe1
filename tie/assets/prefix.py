"""The part of a prompt that is a registered system prompt's, in whole blocks: what every request with it shares.

The runtime keeps the keys and values of these blocks for all (docs/prefix-cache.md); a conversation's cache leaves them
out and names them by hash. Both go by the bundle alone, so both find the same.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Final

_LABEL: Final = b"tie/shared-prefix/1\0"


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The shared beginning of a prompt.

    Attributes:
        blocks: how many.
        sha256: of its token ids; empty where there is none.
    """

    blocks: int
    sha256: bytes


NO_PREFIX: Final = SharedPrefix(0, b"")


def shared_prefix(registered: Iterable[Sequence[int]], prompt: Sequence[int], block_tokens: int) -> SharedPrefix:
    """The longest run of whole blocks that `prompt` has in common with one of `registered`, without its last token."""
    tokens = prompt[:-1]
    most = max((common_length(each, tokens) for each in registered), default=0)
    blocks = most // block_tokens if block_tokens > 0 else 0  # what another process says blocks are
    if not blocks:
        return NO_PREFIX
    ids = tokens[: blocks * block_tokens]
    return SharedPrefix(blocks, hashlib.sha256(_LABEL + struct.pack(f"<{len(ids)}I", *ids)).digest())


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading elements are equal."""
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))
