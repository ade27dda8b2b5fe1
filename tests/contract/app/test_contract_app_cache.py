"""A turn key, and a cache that is not there or does not answer: the request is served as if it had none."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from kvxfer import channel
from tie.app import session
from tie.daemon.socket_path import prepare_directory
from tie.envelope.secret import Secret
from tie.proto import app_pb2, request_pb2, runtime_pb2


def asking(text: str) -> request_pb2.InferenceRequest:
    return request_pb2.InferenceRequest(prompt=text, turn_key=bytes(range(32)))


async def test_without_a_store_the_request_is_served(node):
    async with node.runtime.live():
        job = await node.asked(asking("hello"))
        texts, done = await job.outcome()
        assert (done.status, texts[0]) == (app_pb2.STATUS_OK, "hello")
        (request,) = node.runtime.requests
        assert (request.import_ticket, request.export_ticket) == (b"", b"")
        assert await job.exit_code() == 0


async def test_the_cryptography_library_is_there_before_the_request(node, monkeypatch):
    """A pair that stands by has the time to load it; a request would wait for it."""
    monkeypatch.setenv("TIE_DUMPABLE", "1")  # or only root may look
    async with node.runtime.live():
        job = await node.start()
        await job.ready()
        async with asyncio.timeout(20):
            while "/cryptography/" not in Path(f"/proc/{job.process.pid}/maps").read_text():
                await asyncio.sleep(0.01)
        await job.ask(asking("hello"))
        assert (await job.outcome())[1].status == app_pb2.STATUS_OK


@pytest.mark.parametrize("silent", ["store", "runtime"])
async def test_what_does_not_answer_is_waited_for_a_moment_only(node, silent):
    """The store listens and says nothing; or there is none, and the played runtime knows nothing of transfers."""
    node.configure(cache_timeout_s=0.2)
    prepare_directory(node.config.sockets.store)
    listener = channel.listen(node.config.sockets.store) if silent == "store" else None
    async with node.runtime.live():
        job = await node.asked(asking("hello"))
        texts, done = await job.outcome()
        assert (done.status, texts[0]) == (app_pb2.STATUS_OK, "hello")
        assert await job.exit_code() == 0
    if listener:
        listener.close()


@pytest.mark.parametrize("turn_key", [b"", bytes(range(32))])
async def test_the_request_s_key_is_wiped_before_the_answer_begins(node, monkeypatch, turn_key):
    """A session inside this process, so that its secrets can be looked at."""
    secrets: list[Secret] = []
    given: list[int] = []
    lengths: list[int] = []

    class Seen(Secret):
        __slots__ = ()

        def __init__(self, data: bytes | bytearray) -> None:
            super().__init__(data)
            secrets.append(self)
            given.append(len(data))

    monkeypatch.setattr(session, "Secret", Seen)
    echo = node.runtime.echo

    async def answer(request: runtime_pb2.GenerateRequest) -> AsyncGenerator[runtime_pb2.GenerateEvent, None]:
        lengths.extend(len(secret) for secret in secrets)
        async for event in echo(request):
            yield event

    node.runtime.answer = answer
    async with node.runtime.live(), node.session_here() as job:
        await job.ready()
        await job.ask(request_pb2.InferenceRequest(prompt="hello", turn_key=turn_key))
        assert (await job.outcome())[1].status == app_pb2.STATUS_OK
    assert max(given) == 32
    assert lengths == [0] * len(given)
