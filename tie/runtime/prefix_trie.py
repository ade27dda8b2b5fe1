"""The trie of registered system prompts: which blocks of a prompt come from the prefix pool. Pure.

A node is one block of tokens, not one token, because keys and values are kept in blocks (paged attention; Kwon et al.
2023): two prompts share a node where they agree on a whole block and on everything before it. The trie is made of the
bundle's registered prompts and never changes: no request can put anything into it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tie.proto import owner_pb2

VERSION = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes the blocks of one runtime right for another: all of it must be equal.

    Attributes:
        manifest_sha256: of the bundle's manifest, which names weights, tokenizer and prompts by hash: 32 bytes.
        software: version of the engine that computes.
        layout: how a block's bytes are laid out.
        block_tokens: positions in one block.
        world_size: ranks that the model is split over.
    """

    manifest_sha256: bytes
    software: str
    layout: str
    block_tokens: int
    world_size: int


@dataclass(eq=False, slots=True)
class _Node:
    number: int
    children: "dict[tuple[int, ...], _Node]" = field(default_factory=dict)


class PrefixTrie:
    """The trie.

    Args:
        prompts: token ids of each registered prompt. What does not fill a block at their end is left out.
        block_tokens: positions in one block.
    """

    def __init__(self, prompts: Iterable[Sequence[int]], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._root = _Node(-1)
        self._entries: list[tuple[int, tuple[int, ...]]] = []  # (1 + the parent's number, tokens) of each node
        for prompt in prompts:
            self._add(prompt)

    def __len__(self) -> int:
        """Nodes: as many as there are blocks in the pool."""
        return len(self._entries)

    def _add(self, prompt: Sequence[int]) -> None:
        node = self._root
        for tokens in self._blocks(prompt, len(prompt)):
            child = node.children.get(tokens)
            if child is None:
                child = node.children[tokens] = _Node(len(self._entries))
                self._entries.append((node.number + 1, tokens))
            node = child

    def match(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Numbers of the nodes that a prompt begins with: the longest match. Its last token is never among them.

        That one has to be computed, for the token after it.
        """
        return self._walk(tokens, len(tokens) - 1)

    def path(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Numbers of all nodes of a registered prompt, in order."""
        return self._walk(prompt, len(prompt))

    def _walk(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        found: list[int] = []
        node = self._root
        for block in self._blocks(tokens, limit):
            child = node.children.get(block)
            if child is None:
                break
            found.append(child.number)
            node = child
        return tuple(found)

    def _blocks(self, tokens: Sequence[int], limit: int) -> "Iterable[tuple[int, ...]]":
        size = self._block_tokens
        return (tuple(tokens[start : start + size]) for start in range(0, limit - size + 1, size))

    def encode(self, identity: Identity) -> bytes:
        """The trie as it goes to the model owner and comes back: equal bytes mean equal blocks."""
        message = owner_pb2.PrefixTrie(
            version=VERSION,
            manifest_sha256=identity.manifest_sha256,
            software=identity.software,
            layout_id=identity.layout,
            block_tokens=identity.block_tokens,
            world_size=identity.world_size,
        )
        for parent, tokens in self._entries:
            message.nodes.add(parent=parent, token_ids=tokens)
        return message.SerializeToString(deterministic=True)
