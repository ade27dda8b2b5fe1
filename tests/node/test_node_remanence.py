"""A secret that was said to the node is found nowhere in it once the turn has ended and the runtime was recycled.

Looked for as text, as token ids in every width and coding that the code uses, and as bytes of its KV blocks, in the
memory of every process of the node, in every memfd that one holds, in its files and its log. Needs root, to look.
"""

import asyncio
import contextlib
import os
import secrets
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvxfer import transfer
from kvxfer.channel import Channel
from kvxfer.transfer import Consumer
from tie.app.prompt import Model, messages
from tie.cli import control
from tie.daemon.triton import TritonClient
from tie.device.conversations import Conversation
from tie.device.request import build
from tie.proto import control_pb2, runtime_pb2

pytestmark = [pytest.mark.node, pytest.mark.skipif(os.geteuid() != 0, reason="reads the memory of other processes")]
CHUNK = 1 << 24
OVERLAP = 256


def needles(text: str, ids: list[int], blocks: list[bytes]) -> dict[str, bytes]:
    """What to look for, by what it is."""
    varint = b"".join(bytes([each & 127 | 128, each >> 7]) if each > 127 else bytes([each]) for each in ids)
    found = {"text": text.encode(), "utf-16": text.encode("utf-16-le"), "ids as varint": varint}
    for code, name in (("H", "16"), ("I", "32"), ("Q", "64")):
        found[f"ids, {name} bits"] = struct.pack(f"<{len(ids)}{code}", *ids)
    for number, block in enumerate(blocks):
        # From several layers: the first byte of each quarter that is not in a run of zeros.
        for quarter in range(4):
            piece = block[len(block) // 4 * quarter :][:64]
            if len(set(piece)) > 16:
                found[f"kv, block {number}, quarter {quarter}"] = piece
    return found


def search(wanted: list[bytes], read) -> set[bytes]:
    """All of `wanted` that is in what `read(offset)` gives, piece by piece."""
    found, offset = set(), 0
    while piece := read(offset):
        found.update(needle for needle in wanted if needle in piece)
        offset += max(1, len(piece) - OVERLAP) if len(piece) == CHUNK else len(piece)
    return found


def regions(pid: int) -> Iterator[tuple[int, int, int]]:
    """Start, end and inode of what a process has in memory of its own making: no unchanged pages of files on disk."""
    span, inode, name, sizes = (0, 0), 0, "", {}
    for line in [*Path(f"/proc/{pid}/smaps").read_text().splitlines(), "0-0 ---p 0 0 0"]:
        words = line.split()
        if words[0].endswith(":"):
            sizes[words[0]] = int(words[1]) if words[1].isdigit() else 0
            continue
        on_disk = name.startswith("/") and not name.startswith(("/memfd:", "/dev/", "/SYSV"))
        if sizes.get("Rss:") and not (on_disk and not sizes["Anonymous:"]) and not name.startswith("[v"):
            yield *span, inode
        first, last = (int(part, 16) for part in words[0].split("-"))
        span, inode, name, sizes = (first, last), int(words[4]), " ".join(words[5:]), {}


def look(node, wanted: list[bytes]) -> dict[str, set[bytes]]:
    """Where something is found: process, memfd or file."""
    hits: dict[str, set[bytes]] = {}
    seen: set[int] = set()

    def note(where: str, read) -> None:
        if found := search(wanted, read):
            hits.setdefault(where, set()).update(found)

    for process in node.processes():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
            name = f"{process.pid} {' '.join(process.cmdline())[:80]}"
            # Descriptors before mappings: what both show is searched once, whole.
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target, inode = str(entry.readlink()), entry.stat().st_ino
                    if "memfd:" in target and inode not in seen:
                        seen.add(inode)
                        with entry.open("rb") as memfd:
                            note(f"{name} {target}", lambda offset, of=memfd: os.pread(of.fileno(), CHUNK, offset))
            memory = os.open(f"/proc/{process.pid}/mem", os.O_RDONLY)
            try:
                for start, end, inode in list(regions(process.pid)):
                    if inode in seen:
                        continue

                    def read(offset: int, start=start, end=end, memory=memory) -> bytes:
                        with contextlib.suppress(OSError):
                            return os.pread(memory, min(CHUNK, end - start - offset), start + offset)
                        return b""

                    note(name, read)
            finally:
                os.close(memory)
    for path in [*Path(node.run_dir).rglob("*"), *Path("/dev/shm").rglob("*")]:
        with contextlib.suppress(OSError):
            if path.is_file():
                content = path.read_bytes()
                note(str(path), lambda offset, content=content: content[offset : offset + CHUNK])
    log = node.log_text().encode()
    note("log", lambda offset: log[offset : offset + CHUNK])
    return hits


async def kv_blocks(node, ids: list[int]) -> list[bytes]:
    """The blocks of a prompt, out of the runtime itself, as an app gets them."""
    with Channel.connect(node.config.sockets.kv, timeout=10) as kv:
        kv.receive(timeout=10)
        kv.send(runtime_pb2.KvRequest(prepare_export=runtime_pb2.PrepareExport()).SerializeToString(), timeout=10)
        message, descriptors = kv.receive(timeout=10)
        reply = runtime_pb2.KvReply.FromString(message)
        request = runtime_pb2.GenerateRequest(token_ids=ids, max_tokens=1, export_ticket=reply.ticket)
        async with TritonClient(node.config.sockets.triton) as triton:
            async for _ in triton.generate(request, timeout=60):
                pass
        with Channel.adopt(descriptors[0]) as channel:
            transfer.request(channel, 0, timeout=10)
            with Consumer(channel, max_bytes=1 << 30, timeout=10) as consumer:
                consumer.wait(consumer.header.block_count, timeout=10)
                consumer.finish(timeout=10)
                blocks = []
                for index in range(consumer.header.block_count):
                    with consumer.block(index) as view:
                        blocks.append(bytes(view))
                return blocks


async def test_a_secret_is_nowhere_once_the_turn_has_ended_and_the_runtime_was_recycled(node, client, model, served):
    secret = " ".join(secrets.token_hex(4) for _ in range(12))
    conversation = Conversation([{"role": "system", "content": "Remember what you are told, and answer in few words."}])
    question = f"My code words are {secret}. Keep them. Which rivers do you know?"
    loaded = Model.load(node.config)
    request = build(model=model, messages=conversation.asking(question))
    ids = loaded._chat(messages(request.messages), [])
    own = loaded.tokenizer.encode(secret)
    start = next(at for at in range(len(ids)) if ids[at + 2 : at + 10] == own[2:10])
    blocks = await kv_blocks(node, ids)
    inner = range((start + 15) // 16, (start + len(own)) // 16)
    assert inner, "no block is wholly of the secret"
    looked_for = needles(secret, ids[start + 2 : start + 14], [blocks[number] for number in inner])
    assert len(looked_for) >= 10
    wanted = list(looked_for.values())

    saved = node.log_text().count("app.conversation-saved")
    ask = {"model": model, "temperature": 0.0, "max_tokens": 16, **conversation.options}
    answer = await (await client.chat(conversation.asking(question), **ask)).result()
    conversation.answered(question, answer.text)
    deadline = time.monotonic() + 30
    while node.log_text().count("app.conversation-saved") == saved:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)

    # That it can be found where it is: the runtime that has just computed it.
    before = await asyncio.to_thread(look, node, wanted)
    where = {name for name, found in before.items() if found & {it for key, it in looked_for.items() if "kv" in key}}
    assert any("triton_python_backend_stub" in name for name in where), before.keys()

    async with control.connected(node.run_dir) as connection:
        async for progress in connection.node.Recycle(control_pb2.RecycleRequest(reason="operator"), timeout=120):
            if progress.finished:
                break
    await served()
    after = await asyncio.to_thread(look, node, wanted)
    names = {needle: name for name, needle in looked_for.items()}
    assert {where: sorted(names[needle] for needle in found) for where, found in after.items()} == {}

    # And it is not lost: with its key the conversation goes on.
    again = await (await client.chat(conversation.asking("Name one."), **ask)).result()
    assert again.cached_tokens >= len(ids) // 16 * 16
