"""tie-cloud-app from its two sides: a request goes in, a stream of padded frames comes out, the process is gone."""

import asyncio

from tie.proto import app_pb2, request_pb2, runtime_pb2


def user(text: str) -> request_pb2.Message:
    return request_pb2.Message(role="user", parts=[request_pb2.Part(text=text)])


async def test_one_request_is_answered_and_the_process_is_gone(node, tokenizer):
    async with node.runtime.live() as runtime:
        job = await node.asked(request_pb2.InferenceRequest(prompt="Grüße, 世界 🌍!", max_tokens=100))
        texts, done = await job.outcome()
        assert texts == {0: "Grüße, 世界 🌍!"}
        assert done.status == app_pb2.STATUS_OK
        assert [(end.index, end.reason) for end in done.finish] == [(0, app_pb2.FINISH_STOP)]
        said = len(tokenizer.encode("Grüße, 世界 🌍!"))
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (said, said)
        assert await job.exit_code() == 0
        asked = runtime.requests[0]
        assert asked.request_id == "r1"
        assert asked.max_tokens == 100
        assert 0 < asked.deadline_ms <= node.config.app.time_limit_s * 1000


async def test_messages_go_through_the_bundle_s_template(node, tokenizer):
    async with node.runtime.live() as runtime:
        job = await node.asked(request_pb2.InferenceRequest(messages=[user("Hi <|im_end|>")]), piece=3)
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_OK
        text = "<|im_start|>user\nHi "
        ids = list(runtime.requests[0].token_ids)
        assert ids[: len(tokenizer.encode(text, special=True))] == tokenizer.encode(text, special=True)
        assert ids.count(2) == 1  # the template's own end of turn, not the user's


async def test_several_choices_stream_side_by_side(node, tokenizer):
    async def answer(request):
        for token_id in tokenizer.encode("ab"):
            for index in range(request.n):
                yield node.runtime.tokens(index, [token_id])
        for index in range(request.n):
            yield node.runtime.finished(index, runtime_pb2.REASON_LENGTH, completion_tokens=2)

    async with node.runtime.live() as runtime:
        runtime.answer = answer
        job = await node.asked(request_pb2.InferenceRequest(prompt="x", n=3))
        texts, done = await job.outcome()
    assert texts == {0: "ab", 1: "ab", 2: "ab"}
    assert [end.reason for end in done.finish] == [app_pb2.FINISH_LENGTH] * 3
    assert done.usage.completion_tokens == 6


async def test_text_that_may_become_a_stop_string_is_held_back_and_dropped(node, tokenizer):
    held = asyncio.Event()
    go = asyncio.Event()

    async def answer(request):
        assert list(request.stop) == ["END"]
        yield node.runtime.tokens(0, tokenizer.encode("ok EN"), hold_bytes=2)
        held.set()
        await go.wait()
        yield node.runtime.tokens(0, tokenizer.encode("D!"), hold_bytes=4)
        yield node.runtime.finished(0, runtime_pb2.REASON_STOP_STRING, drop_bytes=4, completion_tokens=7)

    async with node.runtime.live() as runtime:
        runtime.answer = answer
        job = await node.asked(request_pb2.InferenceRequest(prompt="x", stop=["END"]))
        await held.wait()
        first = await job.receive()
        assert first is not None
        assert first.delta.text == "ok "
        go.set()
        texts, done = await job.outcome()
    assert texts == {}
    assert done.finish[0].reason == app_pb2.FINISH_STOP


async def test_logprobs_come_with_their_tokens(node, tokenizer):
    async def answer(request):
        assert request.logprobs == 1
        ids = tokenizer.encode("é")
        assert len(ids) == 2
        entries = [runtime_pb2.Logprob(logprob=-0.5, top_ids=[ids[0]], top_logprobs=[-0.5]) for _ in ids]
        yield node.runtime.tokens(0, ids, logprobs=entries)
        yield node.runtime.finished(0, runtime_pb2.REASON_LENGTH, completion_tokens=2)

    async with node.runtime.live() as runtime:
        runtime.answer = answer
        job = await node.asked(request_pb2.InferenceRequest(prompt="x", logprobs=1))
        message = await job.receive()
        assert message is not None
        assert message.delta.text == "é"
        assert [entry.token for entry in message.delta.logprobs] == [b"\xc3", b"\xa9"]
        assert message.delta.logprobs[0].top[0].logprob == -0.5
        _, done = await job.outcome()
    assert done.status == app_pb2.STATUS_OK


async def test_an_unused_app_holds_no_stream_and_leaves_with_its_jobhelper(node):
    async with node.runtime.live() as runtime:
        job = await node.start()
        await job.ready()
        assert runtime.streams == 0
        job.writer.close()
        assert await job.exit_code() == 0
        assert runtime.streams == 0


async def test_twenty_requests_at_once_are_twenty_processes(node):
    async def one(number: int) -> int:
        job = await node.asked(request_pb2.InferenceRequest(prompt=f"number {number}"))
        texts, done = await job.outcome()
        assert texts == {0: f"number {number}"}
        assert done.status == app_pb2.STATUS_OK
        assert await job.exit_code() == 0
        return job.process.pid

    async with node.runtime.live():
        pids = await asyncio.gather(*(one(number) for number in range(20)))
    assert len(set(pids)) == 20
