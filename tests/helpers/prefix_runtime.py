"""A runtime's prefixes beside a real owner of pools, and what the next runtime makes of its pool."""

import gc
import hashlib
from dataclasses import replace
from pathlib import Path

from tie.assets.manifest import Architecture, FileEntry, Manifest, SystemPrompt, TokenizerInfo
from tie.bones.blocks import HostBlocks
from tie.runtime.kv_blocks import Format, Kept
from tie.runtime.prefix_pool import RankedPool
from tie.runtime.prefixes import Prefixes

TOKENS = 4
BYTES = 64
FORMAT = Format("model", "release", "layout", TOKENS, BYTES)
PROMPTS = {"one": tuple(range(1, 12)), "two": (1, 2, 3, 4, 9, 9, 9, 9), "short": (7, 7)}
BLOCKS = 3  # two of "one", one of "two"; its first is shared, "short" has none


def manifest(prompts=PROMPTS, **changes) -> Manifest:
    files = {name: FileEntry(sha256="0" * 64, bytes=1) for name in ("tokenizer.json", "tensors.json", "w.gguf")}
    shape = Architecture(
        kind="llama", hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
        vocab_size=300, context_tokens=64, rms_norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip
    fields = {
        "model": "model",
        "release": "release",
        "architecture": shape,
        "files": files,
        "weights": ("w.gguf",),
        "weights_format": "gguf",
        "tokenizer": TokenizerInfo(end_of_turn_ids=(2,)),
        "system_prompts": tuple(SystemPrompt(name=name, text=name, token_ids=ids) for name, ids in prompts.items()),
    }
    return Manifest(**(fields | changes))


class Part(HostBlocks):
    """A rank's memory. Its blocks' bytes follow from the tokens up to there, and from the rank."""

    def __init__(self, rank: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.data = bytearray(64 * block_bytes)
        self.salt = b"%d" % rank

    def block_view(self, block):
        return memoryview(self.data)[block * self.block_bytes : (block + 1) * self.block_bytes]

    def bytes_of(self, tokens) -> bytes:
        return (hashlib.sha256(self.salt + bytes(tokens)).digest() * 64)[: self.block_bytes]


class Runtime:
    """The part of one that has to do with prefixes, on ranks whose slices of a block are of different sizes."""

    def __init__(self, path, *, bundle=None, format=FORMAT, ranks=1, most_blocks=9) -> None:  # noqa: A002
        self.parts = [Part(rank, format.block_bytes >> rank) for rank in range(ranks)]
        self.computed: list[tuple[int, ...]] = []
        self.pool: RankedPool | None = None
        self.format = replace(format, block_bytes=sum(part.block_bytes for part in self.parts))
        self.prefixes = Prefixes(
            path,
            bundle or manifest(),
            format=self.format,
            parts=self.parts,
            most_blocks=most_blocks,
            on_ready=self._ready,
        )

    def _ready(self, trie, pool):  # noqa: ARG002 (the signature is the hook's)
        self.pool = pool

    def bytes_of(self, tokens) -> bytes:
        return b"".join(part.bytes_of(tokens) for part in self.parts)

    def compute(self, prompt) -> Kept:
        self.computed.append(tuple(prompt))
        size = self.format.block_tokens
        blocks = range(10, 10 + len(prompt) // size)  # somewhere in the pool
        for index, block in enumerate(blocks):
            for part in self.parts:
                part.block_view(block)[:] = part.bytes_of(prompt[: (index + 1) * size])
        return Kept(tuple(blocks), lambda: None)

    def warm(self) -> "Runtime":
        for index in range(len(PROMPTS)):
            self.prefixes.warm(index, self.compute)
        return self

    def sound(self) -> bool:
        """Whether every block that it would serve is the right one."""
        assert self.pool is not None
        prompts = [prompt for prompt in PROMPTS.values() if len(prompt) >= TOKENS]
        return all(
            bytes(self.pool.block(node)) == self.bytes_of(prompt[: (index + 1) * TOKENS])
            for prompt in prompts
            for index, node in enumerate(self.prefixes.trie.path(prompt))
        )


def restarted(path, **changes) -> Runtime:
    runtime = Runtime(path, **changes)
    runtime.prefixes.restore()
    return runtime


def mappings() -> dict[int, str]:
    """Of pools in this process: where, and with which rights. Those of tests before this one are gone."""
    gc.collect()
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "tie-prefix-pool" in line]
    return {int(line.split("-")[0], 16): line.split()[1] for line in lines}
