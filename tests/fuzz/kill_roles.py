"""The processes that `kills.py` kills: an app that goes from turn to turn, and a runtime without a model.

Both are the product's own code (tie.app.conversation, tie.runtime.kv_transfer, kv.sock) save for the forward pass: a
block's content is a function of the conversation and the block's number, so that every restored byte can be checked.
They say what they do, one JSON object a line, with times of the system-wide monotonic clock.
"""

import contextlib
import hashlib
import json
import os
import random
import resource
import select
import struct
import sys
import threading
import time
from pathlib import Path

from kvxfer.channel import Channel, listen
from kvxfer.errors import KvxferError
from kvxfer.pool import BufferPool
from tie.app.conversation import Conversation
from tie.app.placed import Prompt
from tie.assets.prefix import NO_PREFIX
from tie.bones.blocks import HostBlocks
from tie.daemon.errors import TieError
from tie.proto import runtime_pb2
from tie.runtime.kv_blocks import Format, Kept
from tie.runtime.kv_server import KvServer
from tie.runtime.kv_transfer import Limits, Transfers
from tie.runtime.sequence import Sequence
from tie.store.client import StoreError
from tie.warden.keys import ConversationKey, Root
from tie.warden.manifest import CacheFormat

BLOCK_TOKENS, BLOCK_BYTES, MOST_BLOCKS = 16, 1 << 16, 48
NAMES = ("model", "release", "layout")
WAIT_S = 20.0
_GENERATE = struct.Struct("<16sI32s32s")
_GENERATED = struct.Struct("<II")
_NO_TICKET = bytes(32)


def say(**event: object) -> None:
    """One line for `kills.py`; a single write, which is whole or not there at all."""
    os.write(1, json.dumps({"at": time.monotonic(), **event}).encode() + b"\n")


def content(name: bytes, block: int) -> bytes:
    """What a forward pass would have computed."""
    return hashlib.sha256(name + block.to_bytes(4, "little")).digest() * (BLOCK_BYTES // 32)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def shared_kib() -> int:
    """Shared memory that this process has mapped and present."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1])


class Memory(HostBlocks):
    """The executor's blocks."""

    def __init__(self) -> None:
        self._bytes = bytearray(MOST_BLOCKS * BLOCK_BYTES)

    def block_view(self, block: int) -> memoryview:
        return memoryview(self._bytes)[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]


class Runtime:
    """Serves kv.sock as the runtime does, and "generates" on a socket of its own."""

    def __init__(self, kv: Path, generate: Path) -> None:
        self._memory = Memory()
        limits = Limits(sequence_blocks=MOST_BLOCKS, total_bytes=1 << 26, import_s=5, request_s=5, export_s=5)
        pool = BufferPool(MOST_BLOCKS * BLOCK_BYTES + 4096, spare=1)
        self._transfers = Transfers(Format(*NAMES, BLOCK_TOKENS, BLOCK_BYTES), self._memory, limits, pool)
        self._held = 0
        self._lock = threading.Lock()
        self._server = KvServer(kv, runtime_pb2.KvHello(model="model", release="release"), self._transfers)
        self._listener = listen(generate)

    def run(self) -> None:
        say(phase="up")
        while True:
            connection, _ = self._listener.accept()
            with Channel(connection) as channel, contextlib.suppress(KvxferError):
                while True:
                    self._generate(channel)
            # The app has gone: everything that it had asked for must go.
            deadline = time.monotonic() + WAIT_S
            # An app that only begins anew may be back already: its new connection is none that was left.
            while self._transfers.in_flight or self._held or (self._server.connections and not self._asked_again()):
                if time.monotonic() > deadline:
                    say(failed="the runtime kept what a dead app had asked for")
                time.sleep(0.001)
            say(error="app gone", descriptors=descriptors(), shared=shared_kib())

    def _asked_again(self) -> bool:
        return bool(select.select([self._listener], [], [], 0)[0])

    def _generate(self, channel: Channel) -> None:
        message, _ = channel.receive(timeout=600)
        name, count, import_ticket, export_ticket = _GENERATE.unpack(message)
        blocks = range(count)
        first = 0
        target = Sequence(prompt=(), max_length=0, blocks=list(blocks))
        if import_ticket != _NO_TICKET:
            restored = self._transfers.restore(import_ticket, count * BLOCK_TOKENS + 1).result(WAIT_S)
            if restored:
                while not restored.copy_into(self._memory, target, lambda: False):
                    pass
                first = restored.block_count
                restored.close()
        wrong = 0
        for block in blocks:
            with self._memory.block_view(block) as view:
                if block < first:
                    wrong += view != content(name, block)
                else:
                    view[:] = content(name, block)
        if export_ticket != _NO_TICKET and (keep := self._transfers.keeper(export_ticket)):
            self._count(1)
            keep(Kept(tuple(blocks), lambda: self._count(-1)))
        channel.send(_GENERATED.pack(first, wrong), timeout=WAIT_S)

    def _count(self, change: int) -> None:
        with self._lock:
            self._held += change


class App:
    """Turn after turn of one conversation after another, each turn as tie-cloud-app has it."""

    def __init__(self, kv: Path, generate: Path, store: Path, seed: int) -> None:
        self._kv, self._generate, self._store = kv, generate, store
        self._chance = random.Random(seed)  # noqa: S311 (what is said)
        self._format = CacheFormat(*NAMES, BLOCK_TOKENS, BLOCK_BYTES)

    def run(self) -> None:
        while True:
            try:
                with (
                    contextlib.closing(_patiently(self._kv)) as kv,
                    contextlib.closing(_patiently(self._generate)) as runtime,
                ):
                    kv.receive(timeout=WAIT_S)
                    while True:
                        self._conversation(kv, runtime)
            except (TieError, KvxferError) as error:
                # One line whatever died; with nothing of the turn left.
                say(error=type(error).__name__, descriptors=descriptors(), shared=shared_kib())
                if isinstance(error, StoreError):
                    _patiently(self._store).close()

    def _conversation(self, kv: Channel, runtime: Channel) -> None:
        key, name = self._chance.randbytes(32), self._chance.randbytes(16)
        tokens: list[int] = []
        known = 0
        while True:
            tokens += [self._chance.randrange(1 << 16) for _ in range(BLOCK_TOKENS * self._chance.randint(2, 12))]
            if len(tokens) > MOST_BLOCKS * BLOCK_TOKENS:
                return
            restored = self._turn(kv, runtime, key, name, tokens)
            if restored not in {known, 0}:
                say(failed="other blocks were restored than had been saved", restored=restored, known=known)
            known = len(tokens) // BLOCK_TOKENS
            say(turn=restored, descriptors=descriptors(), shared=shared_kib())

    def _turn(self, kv: Channel, runtime: Channel, key: bytes, name: bytes, tokens: list[int]) -> int:
        conversation = Conversation(
            ConversationKey(Root.TURN, key), self._format, self._store, prefix=NO_PREFIX, timeout=WAIT_S, ttl_s=600
        )
        with contextlib.closing(conversation), contextlib.ExitStack() as stack:
            say(phase="look up")
            conversation.look_up(Prompt((*tokens, 0)))
            ask = runtime_pb2.KvRequest(prepare_export=runtime_pb2.PrepareExport())
            export_ticket, (channel,) = _ask(kv, ask, 1)
            export = stack.enter_context(Channel.adopt(channel))
            import_ticket = _NO_TICKET
            if conversation.blocks:
                ask = runtime_pb2.KvRequest(prepare_import=runtime_pb2.PrepareImport(block_count=conversation.blocks))
                import_ticket, (channel, buffer) = _ask(kv, ask, 2)
                stack.callback(os.close, buffer)
                restoring = stack.enter_context(Channel.adopt(channel))
            runtime.send(
                _GENERATE.pack(name, len(tokens) // BLOCK_TOKENS, import_ticket, export_ticket), timeout=WAIT_S
            )
            if conversation.blocks:
                say(phase="restore")
                conversation.restore(restoring, buffer)
            say(phase="generate")
            restored, wrong = _GENERATED.unpack(runtime.receive(timeout=WAIT_S)[0])
            if wrong:
                say(failed="a block was restored that is not what had been saved", wrong=wrong)
            # The device has its `done` here.
            say(phase="save")
            conversation.save(tokens, (), export)
        return int(restored)


def _ask(kv: Channel, request: runtime_pb2.KvRequest, count: int) -> tuple[bytes, list[int]]:
    kv.send(request.SerializeToString(), timeout=WAIT_S)
    message, received = kv.receive(timeout=WAIT_S)
    reply = runtime_pb2.KvReply.FromString(message)
    if len(received) != count:
        say(failed="the runtime refused a transfer", refusal=reply.refusal)
    return reply.ticket, received


def _patiently(path: Path) -> Channel:
    """Connects to a server that is about to come (back)."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return Channel.connect(path, timeout=WAIT_S)
        except KvxferError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def main() -> None:
    """The process of a role."""
    role, directory, store, seed = sys.argv[1:]
    kv, generate = Path(directory) / "kv.sock", Path(directory) / "gen.sock"
    if role == "app":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as in its unit: it may write no file, nor to a memfd
    if role == "runtime":
        generate.unlink(missing_ok=True)  # of one that was killed
        Runtime(kv, generate).run()
    App(kv, generate, Path(store), int(seed)).run()


if __name__ == "__main__":
    main()
