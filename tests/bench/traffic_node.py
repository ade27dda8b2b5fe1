"""A TCP relay between devices and a node's ingress, which notes what passes: sizes and times, as any network could."""

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from traffic_wire import Exchange

from tie.assets.bundle import open_bundle
from tie.assets.tokenizer import Tokenizer, load_tokenizer
from tie.cli.assets import demo_bundle
from tie.cli.local_node import LocalNode
from tie.cli.settings import cache_dir
from tie.device.async_client import AsyncClient
from tie.proto import control_pb2

START_S = 120.0
AT_ONCE = 4
_READ_BYTES = 1 << 16
_QUESTION = [{"role": "user", "content": "Write something."}]

Kinds = Callable[[Tokenizer], tuple[list[int], list[int]]]


class Tap:
    """Relays connections, and notes what comes from the node."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.frames: list[tuple[float, int]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes a connection."""
        task = asyncio.create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cuts all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._copy(reader, back, None), self._copy(there, writer, self.frames))
        except ConnectionError:
            return  # either side may hang up
        finally:
            writer.close()
            back.close()

    @staticmethod
    async def _copy(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, noted: list[tuple[float, int]] | None
    ) -> None:
        clock = asyncio.get_running_loop().time
        while data := await reader.read(_READ_BYTES):
            if noted is not None:
                noted.append((clock(), len(data)))
            writer.write(data)
            await writer.drain()
        writer.write_eof()


@asynccontextmanager
async def tapped(port: int) -> AsyncIterator[tuple[str, Tap]]:
    """An address that leads to the node's, and what is heard there."""
    tap = Tap(port)
    server = await asyncio.start_server(tap, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", tap
    finally:
        server.close()
        await tap.close()


async def _ask(node: LocalNode, model: str, ids: list[int], tokens: int) -> Exchange:
    """One answer; `long` is left for the caller to say."""
    key = node.config.sockets.statement_key.with_suffix(".pub")
    async with tapped(node.port) as (url, tap), AsyncClient(url, key) as client:
        await client.node()  # the statement comes over a connection of its own, and is no part of the answer
        tap.frames.clear()
        answer = await client.chat(
            _QUESTION, model=model, temperature=1, allowed_token_ids=ids, max_tokens=tokens, ignore_eos=True
        )
        result = await answer.result()
    return Exchange(long=False, text_bytes=len(result.text.encode()), frames=list(tap.frames))


async def _watch(node: LocalNode, kinds: Kinds, exchanges: int, tokens: int) -> list[Exchange]:
    await node.wait_for(control_pb2.STATE_AVAILABLE, START_S)
    bundle = open_bundle(Path(node.config.model.bundle))
    asked = [(bool(long), ids) for long, ids in enumerate(kinds(load_tokenizer(bundle))) for _ in range(exchanges)]
    random.Random(0).shuffle(asked)  # noqa: S311 (no secret)
    waiting, seen = iter(asked), []

    async def stream() -> None:
        for long, ids in waiting:
            seen.append(replace(await _ask(node, bundle.manifest.model, ids, tokens), long=long))

    await asyncio.gather(*(stream() for _ in range(AT_ONCE)))
    return seen


def watched(kinds: Kinds, options: argparse.Namespace) -> list[Exchange]:
    """So many answers of each kind through a node of its own."""
    bundle = options.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    overrides = ["probe.canary_deadline_s=60", f"cloudboard.standby={AT_ONCE}", *options.overrides]
    node = LocalNode(bundle=bundle, overrides=overrides)
    try:
        return asyncio.run(_watch(node, kinds, options.exchanges, options.tokens))
    finally:
        node.stop()
