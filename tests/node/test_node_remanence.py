"""A secret that was said to the node is found nowhere in it once the turn has ended and the runtime was recycled.

Looked for as text, as token ids in every width and coding that the code uses, and as bytes of its KV blocks, in the
memory of every process of the node, in every memfd that one holds or maps, in its files and its log. The same search
must find it where it has to be while the turn runs. Needs root, to look.
"""

import asyncio
import os
import secrets
from pathlib import Path

import pytest

from kvxfer import transfer
from kvxfer.channel import Channel
from kvxfer.transfer import Consumer
from memory_search import Findings, Search, needles
from node_log import SAVED, logged
from tie.app.prompt import Model, messages
from tie.cli import control
from tie.daemon.triton import TritonClient
from tie.device.conversations import Conversation
from tie.device.request import build
from tie.proto import control_pb2, runtime_pb2

pytestmark = [pytest.mark.node, pytest.mark.skipif(os.geteuid() != 0, reason="reads the memory of other processes")]
BLOCK = 16
RUNTIME = "triton_python_backend_stub"


def look_everywhere(node, wanted) -> Findings:
    """Every process of the node, its files and its log."""
    search = Search(wanted)
    search.processes(node.processes())
    search.files([*Path(node.run_dir).rglob("*"), *Path("/dev/shm").rglob("*")])
    search.text(node.log_text(), "the log")
    return search.findings


def look_into(node, wanted, names) -> Findings:
    """Some of its processes."""
    search = Search(wanted)
    search.processes(process for name in names for process in node.find(name))
    return search.findings


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
    words = [secrets.token_hex(4) for _ in range(12)]
    conversation = Conversation([{"role": "system", "content": "Remember what you are told, and answer in few words."}])
    question = f"My code words are {' '.join(words)}. Keep them. Which rivers do you know?"
    loaded = Model.load(node.config)
    ids = loaded._chat(messages(build(model=model, messages=conversation.asking(question)).messages), [])
    # The ids of the words alone, without their neighbours, which may have gone into a token with them.
    own = loaded.tokenizer.encode(" ".join(words))[2:-2]
    start = next(at for at in range(len(ids)) if ids[at : at + len(own)] == own)
    inner = range(-(-start // BLOCK), (start + len(own)) // BLOCK)
    assert len(inner) >= 2, "no block is wholly of the secret"
    blocks = await kv_blocks(node, ids)
    wanted = needles(words, own, [blocks[number] for number in inner])
    assert {name.split()[0].rstrip(":") for name in wanted} == {"words", "ids", "kv"}

    # While the turn runs it is found where it must be: the search can find it, in each of its forms.
    ask = {"model": model, "temperature": 0.0, "ignore_eos": True, **conversation.options}
    async with logged(node, SAVED):
        answer = await client.chat(conversation.asking(question), max_tokens=300, **ask)
        await anext(aiter(answer))
        during = await asyncio.to_thread(look_into, node, wanted, ["tie-cloud-app", RUNTIME])
        result = await answer.result()
    assert during.kinds("tie-cloud-app") >= {"words", "ids"}, during.hits
    assert during.kinds(RUNTIME) >= {"ids", "kv"}, during.hits
    conversation.answered(question, result.text)

    async with control.connected(node.run_dir) as connection:
        async for progress in connection.node.Recycle(control_pb2.RecycleRequest(reason="operator"), timeout=120):
            if progress.finished:
                break
    await served()
    after = await asyncio.to_thread(look_everywhere, node, wanted)
    assert after.hits == {}
    # The store's memory was searched: a head, a segment, and what it keeps ready. And so was the runtime's.
    assert sum("tie-entry" in name for name in after.memfds) >= 3
    assert after.searched > 256 << 20

    # And it is not lost: with its key the conversation goes on.
    again = await (await client.chat(conversation.asking("Name one."), max_tokens=8, **ask)).result()
    assert again.cached_tokens >= len(ids) // BLOCK * BLOCK
