"""A generation that is cut: by its time, its device, a death of any process, or a runtime that breaks its contract."""

import asyncio
import os
import signal

import pytest

from tie.proto import app_pb2, request_pb2, runtime_pb2


async def test_a_message_after_the_last_part_ends_the_request(node):
    async with node.runtime.live() as runtime:
        runtime.answer = silent
        job = await node.asked(request_pb2.InferenceRequest(prompt="x"))
        await job.send(app_pb2.AppIn(body=app_pb2.Body(data=b"x")))
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_PROTOCOL_ERROR
        assert await job.exit_code() == 0


async def silent(request):
    await asyncio.sleep(3600)
    yield runtime_pb2.GenerateEvent()


def one_then_silent(node, tokenizer):
    async def answer(request):
        yield node.runtime.tokens(0, tokenizer.encode("first"))
        async for event in silent(request):
            yield event

    return answer


async def streaming(node, tokenizer, **fields):
    """A job whose first delta has come and whose runtime then says nothing more."""
    node.runtime.answer = one_then_silent(node, tokenizer)
    job = await node.asked(request_pb2.InferenceRequest(prompt="x"), **fields)
    message = await job.receive()
    assert message is not None
    assert message.delta.text == "first"
    return job


async def test_the_time_limit_counts_from_open(node):
    async with node.runtime.live() as runtime:
        runtime.answer = silent
        job = await node.asked(request_pb2.InferenceRequest(prompt="x"), limits=app_pb2.Limits(time_limit_ms=300))
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_DEADLINE_EXCEEDED
        assert await job.exit_code() == 0


async def test_an_abort_stops_the_generation(node, tokenizer):
    async with node.runtime.live() as runtime:
        job = await streaming(node, tokenizer)
        await job.send(app_pb2.AppIn(abort=app_pb2.Abort()))
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_CANCELLED
        assert done.finish[0].reason == app_pb2.FINISH_CANCELLED
        assert done.usage.completion_tokens == len("first")
        assert await job.exit_code() == 0
        async with asyncio.timeout(5):
            await runtime.cancelled.wait()


async def test_a_request_that_the_node_ends_is_told_as_cancelled(node, tokenizer):
    async def answer(request):
        yield node.runtime.tokens(0, tokenizer.encode("ab"))
        yield node.runtime.finished(0, runtime_pb2.REASON_CANCELLED, completion_tokens=2)

    async with node.runtime.live() as runtime:
        runtime.answer = answer
        job = await node.asked(request_pb2.InferenceRequest(prompt="x"))
        texts, done = await job.outcome()
        assert texts == {0: "ab"}
        assert done.status == app_pb2.STATUS_CANCELLED
        assert done.finish[0].reason == app_pb2.FINISH_CANCELLED


async def test_a_request_cut_by_a_restart_is_told_so(node, tokenizer):
    async def answer(request):
        yield node.runtime.tokens(0, tokenizer.encode("ab"))
        yield node.runtime.failed(runtime_pb2.CODE_REPLACED, "the node had to restart: send it again")

    async with node.runtime.live() as runtime:
        runtime.answer = answer
        job = await node.asked(request_pb2.InferenceRequest(prompt="x"))
        texts, done = await job.outcome()
        assert texts == {0: "ab"}
        assert (done.status, done.detail) == (app_pb2.STATUS_REPLACED, "the node had to restart: send it again")
        assert done.finish[0].reason == app_pb2.FINISH_CANCELLED
        assert done.usage.completion_tokens == 2


async def test_the_runtime_s_death_in_mid_stream_is_told_within_two_seconds(node, tokenizer):
    async with node.runtime.live() as runtime:
        job = await streaming(node, tokenizer)
        runtime.die()
        async with asyncio.timeout(2):
            _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE
        assert done.finish[0].reason == app_pb2.FINISH_ERROR
        assert await job.exit_code() == 0


async def test_triton_s_death_in_mid_stream_is_told_as_well(node, tokenizer):
    async with node.runtime.live():
        job = await streaming(node, tokenizer)
    async with asyncio.timeout(2):
        _, done = await job.outcome()
    assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE


async def test_the_jobhelper_s_death_ends_the_process_and_the_generation(node, tokenizer):
    async with node.runtime.live() as runtime:
        job = await streaming(node, tokenizer)
        job.writer.transport.abort()
        async with asyncio.timeout(2):
            assert await job.exit_code() == 0
        async with asyncio.timeout(5):
            await runtime.cancelled.wait()


async def test_a_termination_signal_ends_a_request_with_busy(node, tokenizer):
    async with node.runtime.live():
        job = await streaming(node, tokenizer)
        os.kill(job.process.pid, signal.SIGTERM)
        async with asyncio.timeout(2):
            _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_BUSY
        assert await job.exit_code() == 0


async def test_a_killed_app_shows_as_a_stream_that_ends_without_done(node, tokenizer):
    async with node.runtime.live() as runtime:
        job = await streaming(node, tokenizer)
        os.kill(job.process.pid, signal.SIGKILL)
        assert await job.receive() is None
        async with asyncio.timeout(5):
            await runtime.cancelled.wait()


async def test_an_unused_app_leaves_when_the_runtime_goes_and_says_why(node):
    async with node.runtime.live() as runtime:
        job = await node.start()
        await job.ready()
        runtime.die()
        async with asyncio.timeout(2):
            _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE
        assert await job.exit_code() == 0


@pytest.mark.parametrize(
    "misdeed", ["empty", "early end", "index", "after finish", "holds what was sent", "drops what was sent"]
)
async def test_a_runtime_that_breaks_its_contract_ends_the_request_as_internal(node, tokenizer, misdeed):
    async def answer(request):
        yield node.runtime.tokens(0, tokenizer.encode("abc"))
        match misdeed:
            case "early end":
                return
            case "empty":
                yield runtime_pb2.GenerateEvent()
            case "index":
                yield node.runtime.tokens(1, [5])
            case "after finish":
                yield node.runtime.finished(0, runtime_pb2.REASON_LENGTH)
                yield node.runtime.tokens(0, [5])
            case "holds what was sent":
                yield node.runtime.tokens(0, [], hold_bytes=1)
            case "drops what was sent":
                yield node.runtime.finished(0, runtime_pb2.REASON_STOP_STRING, drop_bytes=1)

    async with node.runtime.live() as runtime:
        runtime.answer = answer
        job = await node.asked(request_pb2.InferenceRequest(prompt="x"))
        texts, done = await job.outcome()
        assert texts == {0: "abc"}
        assert done.status == app_pb2.STATUS_INTERNAL
        assert await job.exit_code() == 1
        assert "ProtocolError" in await job.log()
