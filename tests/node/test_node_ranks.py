"""A real node whose model is on two ranks: conversations, registered prompts, and a recycle, as with one."""

import pytest

from node_log import SAVED, logged
from tie.assets.sample import make_sample_bundle
from tie.cli import control
from tie.device.conversations import Conversation
from tie.proto import control_pb2

pytestmark = pytest.mark.node
MORE_OVERRIDES = ("runtime.tensor_parallel=2", "runtime.threads=1")
PROMPT = "You are a guide who knows rivers and says so in few words. "
BLOCK = 16


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    """A random model whose tokens are bytes."""
    prompts = {"guide": PROMPT}
    return make_sample_bundle(
        tmp_path_factory.mktemp("ranks") / "bundle", context_tokens=1024, system_prompts=prompts
    ).directory


@pytest.fixture
def say(node, client, model):
    async def say(conversation, text):
        async with logged(node, SAVED, times=1 if conversation.options else 0):
            answer = await client.chat(
                conversation.asking(text), model=model, temperature=0.0, max_tokens=24, **conversation.options
            )
            return await answer.result()

    return say


async def test_a_conversation_goes_on_through_a_recycle(node, say, served):
    system = [{"role": "system", "content": PROMPT}]
    cached, plain = Conversation(system), Conversation(system, reusable=False)
    reused = []
    for turn in range(3):
        if turn == 2:
            async with control.connected(node.run_dir) as connection:
                request = control_pb2.RecycleRequest(reason="operator")
                assert [each.error async for each in connection.node.Recycle(request, timeout=120)][-1] == ""
            await served()
        question = f"What is special about river number {turn}?"
        with_key, without = await say(cached, question), await say(plain, question)
        assert with_key.text == without.text
        reused.append((with_key.cached_tokens, without.cached_tokens))
        cached.answered(question, with_key.text)
        plain.answered(question, without.text)
    status = await node.status()
    assert status.runtime.executor == "torch-cpu-f32-tp2"
    assert (status.runtime.prefix.state, status.runtime.prefix.restored) == ("sealed", True)
    shared = reused[0][0]
    assert shared >= len(PROMPT) // BLOCK * BLOCK, "the registered prompt, from the ranks' pools"
    assert [plain for _, plain in reused] == [shared] * 3
    assert shared < reused[1][0] < reused[2][0], "and the conversation, from its entries"
    assert len(node.find("tie.runtime.rank")) == 1
