"""What somebody sees who records everything between a user's machine and the node: sizes of a short list, and noise."""

import asyncio
import contextlib
import json
import os
import random
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest
from hyperframe.frame import DataFrame, Frame

from edge_requests import DEADLINE_S, proxied
from tie.device import AsyncClient
from tie.envelope.frames import FrameSplitter
from tie.envelope.padding import SMALLEST
from tie.envelope.sealing import SALT_BYTES
from tie.envelope.stream import TAG_BYTES
from tie.proto import envelope_pb2

EXCHANGES = 500 if os.environ.get("TIE_SLOW") == "1" else 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass
class Wire:
    """A recorder before the ingress: for each connection what went there and what came back."""

    port: int
    connections: list[tuple[bytearray, bytearray]] = field(default_factory=list)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        record = (bytearray(), bytearray())
        self.connections.append(record)
        await asyncio.gather(self._copy(reader, back, record[0]), self._copy(there, writer, record[1]))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                record += data
                writer.write(data)
                await writer.drain()
        writer.close()

    @property
    def exchanges(self) -> list[tuple[bytes, bytes]]:
        """Bodies of requests, with those of their responses."""
        bodies = [(body(bytes(asked).removeprefix(PREFACE)), body(bytes(told))) for asked, told in self.connections]
        return [(asked, told) for asked, told in bodies if asked]


def body(frames: bytes) -> bytes:
    """Everything in DATA frames, padding of HTTP/2 and all."""
    data = b""
    while frames:
        frame, length = Frame.parse_frame_header(memoryview(frames[:9]))
        frame.parse_body(memoryview(frames[9 : 9 + length]))
        data += frame.data if isinstance(frame, DataFrame) else b""
        frames = frames[9 + length :]
    return data


def request_size(asked: bytes) -> int:
    """Of the plaintext."""
    header, *segments = [envelope_pb2.SealedIn.FromString(payload) for payload in FrameSplitter(1 << 20).feed(asked)]
    assert header.HasField("header")
    return sum(len(one.segment.ciphertext) - TAG_BYTES for one in segments)


def frame_sizes(told: bytes) -> set[int]:
    """Of the plaintexts."""
    return {len(payload) - 1 - TAG_BYTES for payload in FrameSplitter(1 << 20).feed(told[SALT_BYTES:])}


async def repeat(run) -> None:
    """A played app that says what it hears, in pieces of many sizes."""
    request = await run.request()
    said = request.messages[0].parts[0].text
    await run.text(said[:9])
    await run.text(said[9:])
    await run.done()


@contextlib.asynccontextmanager
async def recorded(edge) -> AsyncIterator[tuple[Wire, str]]:
    wire = Wire(edge.config.cloudboard.port)
    async with await asyncio.start_server(wire.connected, "127.0.0.1", 0) as relay:
        client = AsyncClient(f"http://127.0.0.1:{relay.sockets[0].getsockname()[1]}", edge.statement_key)
        async with proxied(client) as url:
            yield wire, url


@pytest.mark.slow
async def test_a_recording_shows_nothing_but_documented_sizes(make_edge) -> None:
    edge = await make_edge(standby=4)
    edge.behaviour = repeat
    dice, words = random.Random(8), []  # noqa: S311 (a choice of lengths)
    async with recorded(edge) as (wire, url), httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
        for number in range(EXCHANGES):
            mine = [secrets.token_hex(4) for _ in range(dice.choice((1, 3, 12, 40, 150, 800)))]
            words += mine
            tool = {"type": "function", "function": {"name": f"t{mine[0]}"}}
            asked = {"messages": [{"role": "user", "content": " ".join(mine)}], "stop": [f"s{mine[0]}"]}
            asked |= {"model": "m", "stream": number % 2 == 0} | ({"tools": [tool]} if number % 3 == 0 else {})
            reply = await http.post("/v1/chat/completions", json=asked)
            assert reply.status_code == 200
            told = reply.text if asked["stream"] else json.loads(reply.text)["choices"][0]["message"]["content"]
            assert mine[-1] in told
    assert len(wire.exchanges) == EXCHANGES
    everything = b"".join(asked + told for asked, told in wire.connections).lower()
    assert [word for word in words if word.encode() in everything] == []
    sizes = {request_size(asked) for asked, _ in wire.exchanges}
    assert all(size >= SMALLEST and size & (size - 1) == 0 for size in sizes)
    assert len(sizes) > 1
    answers = set().union(*(frame_sizes(told) for _, told in wire.exchanges))
    assert answers <= set(edge.config.app.buckets)
    print(f"{EXCHANGES} exchanges: requests of {sorted(sizes)} bytes, frames of {sorted(answers)}")
