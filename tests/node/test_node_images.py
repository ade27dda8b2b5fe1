"""Images through a whole node: sealed on the device, opaque to the app, decoded and seen in the runtime.

The model is a random one: what it says means nothing, but that it says the same of the same picture.
"""

import asyncio
import base64
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import openai
import psutil
import pytest

from image_corpus import bombs, cases, photograph, saved
from memory_search import Search
from node_log import SAVED, logged
from tie.assets.sample import make_sample_vision_bundle
from tie.cli import control
from tie.device.conversations import Conversation
from tie.device.errors import RequestRefusedError
from tie.device.request import with_images
from tie.proto import control_pb2
from tie.runtime.images.decoding import decode
from tie.runtime.images.limits import Limits
from waiting import wait_for

pytestmark = pytest.mark.node

ANSWER_S = 60
SIDE = 96  # which is neither enlarged nor shrunk: its pixels are the encoder's
PNG = saved(photograph(90, 60), "PNG")
JPEG = saved(photograph(70, 90, seed=1), "JPEG")
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    return make_sample_vision_bundle(tmp_path_factory.mktemp("seeing") / "bundle", context_tokens=2048).directory


@pytest.fixture
def api(proxy_url):
    with openai.OpenAI(base_url=proxy_url, api_key="x", timeout=ANSWER_S, max_retries=0) as client:
        yield client


async def ask(client, model, *images, text="What is this?"):
    answer = await client.chat([with_images(text, images)], model=model, logprobs=0, **GREEDY)
    scores = []
    async for delta in answer:
        scores += [token.logprob for token in delta.logprobs]
    return scores, await answer.result()


def url(data: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


async def test_a_picture_is_seen_and_counted(client, model, running_node):
    (first, result), (again, _), (other, _) = [await ask(client, model, data) for data in (PNG, PNG, JPEG)]
    assert first == pytest.approx(again, abs=1e-3)
    assert first != pytest.approx(other, abs=1e-3)
    _, blind = await ask(client, model)
    assert result.prompt_tokens - blind.prompt_tokens == 6 * (4 + 2) + 2 + 1 + (4 + 3)
    assert (await running_node.status()).runtime.executor.startswith("torch-cpu-")


async def test_the_api_takes_data_urls(api, model):
    content = [{"type": "text", "text": "What is "}, url(PNG), {"type": "text", "text": " this?"}, url(JPEG)]
    answer = api.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], max_tokens=3, temperature=0
    )
    assert answer.usage.prompt_tokens > 80
    refused = [{"type": "text", "text": "a"}, url(b"GIF89a and so on")]
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        api.chat.completions.create(model=model, messages=[{"role": "user", "content": refused}])
    assert (raised.value.param, raised.value.code) == ("messages[0].content[1].image_url", "image_refused")
    assert "format-gif" in raised.value.message


def test_the_command_line_sends_a_file(running_node, tmp_path):
    (tmp_path / "picture.png").write_bytes(PNG)
    command = [sys.executable, "-P", "-m", "tie.cli.main", "chat", "--run-dir", str(running_node.run_dir)]
    command += ["--image", str(tmp_path / "picture.png"), "--max-tokens", "3", "--json", "What is this?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    assert '"prompt_tokens": ' in done.stdout
    (tmp_path / "picture.png").write_bytes(b"%PDF-1.7")
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    assert done.returncode == 65
    assert "format-pdf" in done.stderr


async def test_hostile_files_are_refused_and_the_node_goes_on(client, model, node):
    runtime = (await node.status()).runtime.instance_id
    refused = [case for case in [*cases(), *bombs()] if case.refusal and case.data]
    one_of_each = list({case.refusal: case for case in refused}.values())[::3]
    for case in one_of_each:
        with pytest.raises(RequestRefusedError) as raised:
            await ask(client, model, case.data)
        assert raised.value.status == "STATUS_IMAGE_REFUSED", case.name
        assert raised.value.detail.startswith(f"messages[0].parts[0].image: {case.refusal.code}: "), case.name
    assert (await ask(client, model, PNG))[1].completion_tokens == 8
    assert (await node.status()).runtime.instance_id == runtime


def looked(node) -> tuple[float, float]:
    """Images decoded and squares encoded so far."""
    command = [sys.executable, "-m", "tie.cli.main", "metrics", "--run-dir", str(node.run_dir)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
    names = (r'tie_runtime_images_total\{[^}]*outcome="decoded"[^}]*\}', r"tie_runtime_image_squares_total(?:\{.*\})?")
    return tuple(float(re.search(rf"(?m)^{name} (\S+)$", text)[1]) for name in names)


async def turn(node, client, model, messages, options):
    async with logged(node, SAVED, times=1 if options else 0):
        answer = await client.chat(messages, model=model, **GREEDY, **options)
        return await answer.result()


async def test_a_second_turn_neither_decodes_nor_encodes(client, model, node):
    conversation = Conversation()
    first = await turn(node, client, model, conversation.asking("What is this?", [PNG]), conversation.options)
    assert first.cached_tokens == 0
    conversation.answered("What is this?", first.texts[0], [PNG])
    messages = conversation.asking("Really?")
    before = looked(node)
    second = await turn(node, client, model, messages, conversation.options)
    assert looked(node) == before
    assert second.cached_tokens > 46
    plain = await turn(node, client, model, messages, {})
    assert (plain.texts, plain.prompt_tokens) == (second.texts, second.prompt_tokens)
    assert looked(node) == (before[0] + 1, before[1] + 7)


async def test_another_image_of_the_same_size_is_not_taken_for_the_first(client, model, node):
    conversation = Conversation()
    first = await turn(node, client, model, conversation.asking("What is this?", [PNG]), conversation.options)
    conversation.answered("What is this?", first.texts[0], [saved(photograph(90, 60, seed=9), "PNG")])
    messages = conversation.asking("Really?")
    before = looked(node)
    changed = await turn(node, client, model, messages, conversation.options)
    assert looked(node) == (before[0] + 1, before[1] + 7)
    assert changed.cached_tokens < 40
    assert changed.texts == (await turn(node, client, model, messages, {})).texts


def decoders() -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "tie.runtime.images.decoder_process" in (process.info["cmdline"] or [])
    ]


async def test_a_decoder_that_crashes_takes_no_stream_with_it(client, model, node):
    runtime = (await node.status()).runtime.instance_id
    large = saved(np.tile(photograph(600, 600), (6, 6, 1)), "JPEG", progressive=True, quality=90)
    streams = [asyncio.create_task(_stream(client, model)) for _ in range(4)]
    doomed = asyncio.create_task(ask(client, model, large))
    forks = await asyncio.to_thread(wait_for, lambda: [fork for one in decoders() for fork in one.children()])
    os.kill(forks[0].pid, signal.SIGSEGV)
    with pytest.raises(RequestRefusedError) as raised:
        await doomed
    assert "decoder-died" in raised.value.detail
    assert await asyncio.gather(*streams) == [200] * 4
    assert (await ask(client, model, PNG))[1].completion_tokens == 8
    assert (await node.status()).runtime.instance_id == runtime


async def _stream(client, model):
    options = GREEDY | {"max_tokens": 200}
    answer = await client.chat([{"role": "user", "content": "Go on"}], model=model, **options)
    return (await answer.result()).completion_tokens


def test_nothing_of_an_image_is_in_the_log(running_node):
    text = "\n".join(running_node.log_lines())
    assert "GIF89a" not in text
    assert base64.b64encode(PNG).decode()[:40] not in text
    assert Path(running_node.run_dir).exists()


# --- remanence ---


def needles(data: bytes) -> dict[str, bytes]:
    """Pieces of the file, of rows of its pixels, and of the same as numbers, row by row and patch by patch."""
    pixels = decode(data, Limits())
    numbers = ((pixels.astype(np.float32) / 255 - np.float32(0.5)) / np.float32(0.5)).astype(np.float32)
    found = {f"file: {at}": data[at : at + 64] for at in range(100, len(data) - 200, 1500)}
    for row in range(5, SIDE, 20):
        for column in range(3, SIDE - 29, 32):  # within one square
            found[f"pixels: {row} {column}"] = pixels[row, column : column + 28].tobytes()
            found[f"numbers: {row} {column}"] = numbers[row, column : column + 20].tobytes()
        for column in range(0, SIDE, 32):
            patch = numbers[row // 8 * 8 : row // 8 * 8 + 8, column : column + 8].transpose(2, 0, 1)
            found[f"patches: {row} {column}"] = np.ascontiguousarray(patch).tobytes()[:160]
    return found


def look(wanted, processes, *, node=None) -> dict:
    search = Search(wanted)
    search.processes(processes)
    if node:
        search.files([*Path(node.run_dir).rglob("*"), *Path("/dev/shm").rglob("*")])
        search.text(node.log_text(), "the log")
    return search.findings


@pytest.mark.skipif(os.geteuid() != 0, reason="reads the memory of other processes")
async def test_an_image_is_nowhere_once_the_runtime_was_recycled(node, client, model, served):
    data = saved(np.frombuffer(os.urandom(SIDE * SIDE * 3), dtype=np.uint8).reshape(SIDE, SIDE, 3), "PNG")
    wanted = needles(data)
    mine = await asyncio.to_thread(look, wanted, [psutil.Process()])
    kinds = {name.split(":")[0] for name in wanted}
    assert kinds == {"file", "pixels", "numbers", "patches"}
    assert {name.split(":")[0] for hits in mine.hits.values() for name in hits} == kinds, "the search finds each kind"

    question = [with_images("What is this?", [data])]
    answer = await client.chat(question, model=model, temperature=0.0, max_tokens=400, ignore_eos=True)
    await anext(aiter(answer))
    runtime = node.find("triton_python_backend_stub")
    during = await asyncio.to_thread(look, wanted, [*runtime, *node.find("tie-cloud-app")])
    await answer.result()
    assert any(name.startswith("file") for hits in during.hits.values() for name in hits)

    async with control.connected(node.run_dir) as connection:
        async for progress in connection.node.Recycle(control_pb2.RecycleRequest(reason="operator"), timeout=120):
            if progress.finished:
                break
    await served()
    after = await asyncio.to_thread(look, wanted, node.processes(), node=node)
    assert after.hits == {}
    assert after.searched > 64 << 20
