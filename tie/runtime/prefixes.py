"""The system-prompt prefix cache over a runtime's life: restored at its start, or filled when it is warmed.

    NONE                      no registered prompt fills a block: there is nothing to keep
    COLD ──warm──▶ FILLING ──all blocks there──▶ SEALED
      ▲               │ error                      ▲
      └───────────────┘            restored at the start
    COLD ──the owner has no room──▶ OFF            requests are served all the same, without it; so from the start
                                                   where a prompt is too long for what may be kept of the paged KV

Prompts are computed like requests, before the controller first advertises the node: no user waits for them, and they
for no user. docs/prefix-cache.md has the whole picture.
"""

import enum
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tie import __version__
from tie.assets import manifest as manifests
from tie.assets.manifest import Manifest
from tie.daemon import log
from tie.daemon.errors import TieError
from tie.runtime.kv_blocks import Format, Kept, PartMemory
from tie.runtime.owner_channel import OwnerRefusedError, close_all
from tie.runtime.prefix_pool import Place, PoolClient, PoolMemory, RankedPool
from tie.runtime.prefix_restore import Expected, metadata_of, reset_quietly, restore
from tie.runtime.prefix_trie import Identity, PrefixTrie

_TURN_S: Final = 120.0  # for the prompt that is being warmed before one's own
_CLOSE_S: Final = 5.0
_NO_ROOM: Final = frozenset({"pool-too-large", "out-of-memory", "no-memfd"})


class State(enum.Enum):
    """Where the cache is in its life."""

    NONE = "none"
    COLD = "cold"
    FILLING = "filling"
    SEALED = "sealed"
    OFF = "off"


class WarmError(TieError):
    """A prompt could not be computed; the text is static."""


@dataclass(slots=True)
class _Filling:
    """A rank's pool that is being filled."""

    source: PartMemory
    client: PoolClient
    memory: PoolMemory
    descriptors: tuple[int, int]
    digests: dict[int, bytes]

    def close(self) -> None:
        close_all(self.descriptors)
        self.client.close()  # where the pool is not sealed, the owner lets go of it


class Prefixes:
    """The cache of one runtime. `warm` may come from any thread.

    Args:
        owner: owner.sock.
        manifest: the bundle's.
        format: of this runtime's blocks.
        parts: the ranks' memories of the paged KV's blocks, in their order. Each rank has a pool of its own.
        most_blocks: that a prompt may have.
        on_ready: is told of the pool, once it can be used.
    """

    def __init__(
        self,
        owner: Path,
        manifest: Manifest,
        *,
        format: Format,  # noqa: A002
        parts: Sequence[PartMemory],
        most_blocks: int,
        on_ready: Callable[[PrefixTrie, RankedPool], None],
    ) -> None:
        self.restored = False
        self._owner = owner
        self._prompts = tuple(prompt.token_ids for prompt in manifest.system_prompts)
        self._parts = tuple(parts)
        self._on_ready = on_ready
        self.trie = PrefixTrie(self._prompts, format.block_tokens)
        self._state = State.COLD if len(self.trie) else State.NONE
        if any(len(self.trie.path(prompt)) > most_blocks for prompt in self._prompts):
            log.event("prefix.refused", code="prompt-too-long")
            self._state = State.OFF
        self._turn = threading.Lock()
        self._filling: tuple[_Filling, ...] = ()
        self._pool: RankedPool | None = None
        if len(self.trie):
            identity = Identity(
                hashlib.sha256(manifests.encode(manifest)).digest(),
                __version__,
                format.layout,
                format.block_tokens,
                len(self._parts),
            )
            headers = (replace(format, block_bytes=part.block_bytes).header(0, len(self.trie)) for part in parts)
            self._expected = Expected(tuple(headers), self.trie.encode(identity))

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self._state

    def restore(self) -> None:
        """Takes the owner's pool over, where there is one that fits.

        Raises:
            PoolDamagedError: there is one, and it is damaged: this runtime must not start.
            PeerError: the owner is gone.
        """
        if self._state is not State.COLD:
            return
        pool = restore(self._owner, self._expected)
        if pool is not None:
            self.restored = True
            self._ready(pool)

    def warm(self, index: int, compute: Callable[[Sequence[int]], Kept]) -> None:
        """Has a registered prompt in the pool, and seals that when it was the last.

        Args:
            index: of the prompt.
            compute: prefills token ids and gives their blocks.

        Raises:
            WarmError: `compute` could not, or others take too long before.
            PeerError: the owner is gone; what was filled so far is lost, and has to be warmed again.
        """
        if not self._turn.acquire(timeout=_TURN_S):
            raise WarmError("another prompt is still being warmed")
        try:
            self._warm(self._prompts[index], compute)
        finally:
            self._turn.release()

    def close(self) -> None:
        """Lets go of the pool, or leaves that to the end of the process where a prompt is still being warmed.

        The engine must have ended.
        """
        if not self._turn.acquire(timeout=_CLOSE_S):
            log.event("prefix.still-warming")
            return
        try:
            self._give_up(State.OFF)
            if self._pool:
                self._pool.close()
                self._pool = None
        finally:
            self._turn.release()

    def _warm(self, prompt: Sequence[int], compute: Callable[[Sequence[int]], Kept]) -> None:
        if self._state not in {State.COLD, State.FILLING}:
            return
        try:
            if not self._filling:
                self._begin()
            self._fill(prompt, compute)
            if all(len(filling.digests) == len(self.trie) for filling in self._filling):
                for filling in self._filling:
                    self._seal(filling)
                self._sealed()
        except OwnerRefusedError as error:
            self._give_up(State.OFF if error.code in _NO_ROOM else State.COLD)
            log.event("prefix.refused", code=error.code)
            if self._state is State.COLD:
                raise
        except BaseException:
            self._give_up(State.COLD)
            raise

    def _begin(self) -> None:
        blank = [bytes(hashlib.sha256().digest_size)] * self._expected.block_count
        size = len(metadata_of(self._expected.trie, blank))
        self._state = State.FILLING
        for rank, (part, header) in enumerate(zip(self._parts, self._expected.headers, strict=True)):
            client = PoolClient(self._owner, Place(rank, len(self._parts)))
            try:
                descriptors = client.allocate(header, size)
                try:
                    memory = PoolMemory(descriptors[0], header, writable=True)
                except BaseException:
                    close_all(descriptors)
                    raise
            except BaseException:
                client.close()
                raise
            self._filling += (_Filling(part, client, memory, descriptors, {}),)

    def _fill(self, prompt: Sequence[int], compute: Callable[[Sequence[int]], Kept]) -> None:
        path = self.trie.path(prompt)
        if all(node in filling.digests for filling in self._filling for node in path):
            return
        kept = compute(prompt)
        try:
            for filling in self._filling:
                for node, block in zip(path, kept.blocks, strict=False):
                    with filling.memory.block(node) as target:
                        filling.source.read_block(block, target)
                        filling.digests[node] = hashlib.sha256(target).digest()
        finally:
            kept.release()

    def _seal(self, filling: _Filling) -> None:
        digests = [filling.digests[node] for node in range(len(self.trie))]
        metadata = metadata_of(self._expected.trie, digests)
        os.pwrite(filling.descriptors[1], metadata, 0)
        filling.client.seal(metadata, hashlib.sha256(metadata).digest(), self._expected.trie_sha256)
        filling.memory.protect()

    def _sealed(self) -> None:
        """All ranks are."""
        pool = RankedPool([filling.memory for filling in self._filling])
        for filling in self._filling:
            filling.close()
        self._filling = ()
        log.event("prefix.sealed", count=len(self.trie))
        self._ready(pool)

    def _ready(self, pool: RankedPool) -> None:
        self._state = State.SEALED
        self._pool = pool
        self._on_ready(self.trie, pool)

    def _give_up(self, state: State) -> None:
        if len(self._filling) > 1:
            reset_quietly(self._filling[0].client)  # some ranks may be sealed, others not
        for filling in self._filling:
            filling.close()
            filling.memory.close()
        self._filling = ()
        self._state = state
