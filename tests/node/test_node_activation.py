"""`tie assets activate` on a real node: new prompts, new weights, and what is neither."""

import asyncio
import contextlib
import subprocess
import sys

import openai
import pytest

from tie.assets.build import create_bundle, read_source
from tie.assets.bundle import open_bundle
from tie.assets.sample import make_sample_bundle
from tie.cli.evidence import identity
from tie.device.errors import NodeBusyError
from tie.proto import control_pb2

pytestmark = pytest.mark.node
QUESTION = [{"role": "user", "content": "Hello"}]
PROMPT = "You answer in the shortest way that there is, and in capital letters only. " * 4


async def activate(node, bundle):
    command = [sys.executable, "-m", "tie.cli.main", "assets", "activate", str(bundle), "--run-dir", str(node.run_dir)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    async with asyncio.timeout(150):
        _, errors = await process.communicate()
    return process.returncode, errors.decode()


async def test_new_prompts_are_computed_and_the_weights_stay(node, client, model, served, tmp_path):
    await served()
    bundle = create_bundle(
        read_source(node.run_dir / "assets" / "active"), tmp_path / "prompts", system_prompts={"short": PROMPT}
    )
    before = await node.status()
    owner = [identity(process) for process in node.find("tie-model-owner")]
    answers, ended = [], asyncio.Event()

    async def keep_asking():
        while not ended.is_set():
            with contextlib.suppress(NodeBusyError):
                answers.append(await (await client.chat(QUESTION, model=model, max_tokens=2)).result())
            await asyncio.sleep(0.1)

    asking = asyncio.create_task(keep_asking())
    assert await activate(node, bundle.directory) == (0, "")
    ended.set()
    await asking  # every request was answered or refused as busy: none failed
    assert answers
    after = await node.status()
    assert after.state == control_pb2.STATE_AVAILABLE
    assert after.runtime.release == after.owner.release == bundle.manifest.release != before.runtime.release
    assert after.owner.weight_bytes_read == before.owner.weight_bytes_read
    assert [identity(process) for process in node.find("tie-model-owner")] == owner
    assert after.runtime.prefix.blocks == len(bundle.manifest.system_prompts[0].token_ids) // 16
    assert after.owner.pool_resets == before.owner.pool_resets + 1
    asked = [{"role": "system", "content": PROMPT}, *QUESTION]
    answer = await (await client.chat(asked, model=model, max_tokens=2)).result()
    assert answer.cached_tokens == after.runtime.prefix.blocks * 16


async def test_what_is_no_bundle_changes_nothing(node, served, tmp_path):
    before = await node.status()
    code, errors = await activate(node, tmp_path)
    assert code != 0
    assert "no model bundle" in errors
    after = await node.status()
    assert (after.state, after.runtime.instance_id) == (control_pb2.STATE_AVAILABLE, before.runtime.instance_id)
    assert (await served()).text


async def test_new_weights_take_the_place_of_the_old(node, client, model, proxy_url, tmp_path):
    bundle = make_sample_bundle(tmp_path / "sample", context_tokens=1024, system_prompts={"one": PROMPT})
    before = await node.status()
    async with openai.AsyncOpenAI(base_url=proxy_url, api_key="none", timeout=60) as api:
        asked = {"messages": QUESTION, "max_tokens": 2}
        assert (await api.chat.completions.create(model=model, **asked)).choices
        assert await activate(node, bundle.directory) == (0, "")
        with pytest.raises(openai.NotFoundError, match="there is: sample"):
            await api.chat.completions.create(model=model, **asked)
        assert (await api.chat.completions.create(model="sample", **asked)).choices
        assert [each.id async for each in api.models.list()] == ["sample"]
    after = await node.status()
    assert (after.runtime.model, after.owner.model) == ("sample", "sample")
    assert after.owner.generation == after.runtime.owner_generation == before.owner.generation + 1
    assert open_bundle(node.run_dir / "assets" / "active").manifest == bundle.manifest
    answer = await (await client.chat(QUESTION, model="sample", max_tokens=2)).result()
    assert answer.completion_tokens > 0
