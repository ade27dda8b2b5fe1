"""Whatever goes wrong has its own status, padded like everything else; the process ends and nothing hangs."""

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tie.daemon.frames import PREFIX, frame
from tie.proto import app_pb2, request_pb2, runtime_pb2

SECRET = "xyzzy-planted-secret"
EXIT_CONFIG = 78


def user(*parts: request_pb2.Part, role: str = "user") -> request_pb2.Message:
    return request_pb2.Message(role=role, parts=parts or [request_pb2.Part(text="hi")])


def sampling(**values) -> request_pb2.InferenceRequest:
    return request_pb2.InferenceRequest(prompt="x", sampling=request_pb2.Sampling(**values))


def constraint(**value) -> request_pb2.InferenceRequest:
    return request_pb2.InferenceRequest(prompt="x", constraint=request_pb2.Constraint(**value))


TOOL = request_pb2.Tool(name="look", parameters_json="{}")

BODIES = {
    "not protobuf": (b"\xff\xff\xff", "INVALID_REQUEST", "InferenceRequest"),
    "unknown sealed model": (request_pb2.InferenceRequest(model="other", prompt="x"), "UNKNOWN_MODEL", "model"),
    "empty body": (b"", "INVALID_REQUEST", "messages"),
    "messages and prompt": (request_pb2.InferenceRequest(prompt="x", messages=[user()]), "INVALID_REQUEST", "prompt"),
    "bad role": (request_pb2.InferenceRequest(messages=[user(role="root")]), "INVALID_REQUEST", "messages[0].role"),
    "no parts": (
        request_pb2.InferenceRequest(messages=[request_pb2.Message(role="user")]),
        "INVALID_REQUEST",
        "messages[0].parts",
    ),
    "image": (
        request_pb2.InferenceRequest(messages=[user(request_pb2.Part(image=b"png"))]),
        "UNSUPPORTED",
        "messages[0].parts[0].image",
    ),
    "negative max tokens": (request_pb2.InferenceRequest(prompt="x", max_tokens=-5), "INVALID_REQUEST", "max_tokens"),
    "too many choices": (request_pb2.InferenceRequest(prompt="x", n=99), "INVALID_REQUEST", "n:"),
    "temperature": (sampling(temperature=-1), "INVALID_REQUEST", "sampling.temperature"),
    "prompt too long": (request_pb2.InferenceRequest(prompt="x" * 300), "PROMPT_TOO_LONG", "300 tokens"),
    "short turn key": (request_pb2.InferenceRequest(prompt="x", turn_key=b"short"), "INVALID_REQUEST", "turn_key"),
    "schema is no JSON": (constraint(json_schema="{"), "INVALID_REQUEST", "constraint.json_schema"),
    "schema that cannot be": (constraint(json_schema='{"type": "wish"}'), "GRAMMAR_REFUSED", "constraint.json_schema"),
    "regex that is none": (constraint(regex="("), "GRAMMAR_REFUSED", "constraint.regex"),
    "tools without a place": (request_pb2.InferenceRequest(messages=[user()], tools=[TOOL]), "UNSUPPORTED", "tools"),
}


@pytest.mark.parametrize(("body", "status", "detail"), BODIES.values(), ids=BODIES)
async def test_a_bad_request_has_its_own_status_and_names_the_field(node, body, status, detail):
    async with node.runtime.live() as runtime:
        job = await node.start()
        await job.ready()
        await job.ask(body)
        texts, done = await job.outcome()
        assert texts == {}
        assert app_pb2.Status.Name(done.status) == f"STATUS_{status}"
        assert detail in done.detail
        assert await job.exit_code() == 0
        assert runtime.streams == 0


OPEN = app_pb2.AppIn(open=app_pb2.Open(request_id="r1", dek=bytes(32), model="sample"))
PART = app_pb2.AppIn(body=app_pb2.Body(data=b"x"))
STREAMS = {
    "no message": ([b"\xff\xff\xff"], "PROTOCOL_ERROR"),
    "an empty message": ([app_pb2.AppIn()], "PROTOCOL_ERROR"),
    "body before open": ([PART], "PROTOCOL_ERROR"),
    "open twice": ([OPEN, OPEN], "PROTOCOL_ERROR"),
    "no key": ([app_pb2.AppIn(open=app_pb2.Open(request_id="r1"))], "PROTOCOL_ERROR"),
    "no request id": ([app_pb2.AppIn(open=app_pb2.Open(dek=bytes(32)))], "PROTOCOL_ERROR"),
    "abort before open": ([app_pb2.AppIn(abort=app_pb2.Abort())], "CANCELLED"),
    "abort in the body": ([OPEN, PART, app_pb2.AppIn(abort=app_pb2.Abort())], "CANCELLED"),
    "another model": ([app_pb2.AppIn(open=app_pb2.Open(request_id="r", dek=bytes(32), model="b"))], "UNKNOWN_MODEL"),
}


@pytest.mark.parametrize(("messages", "status"), STREAMS.values(), ids=STREAMS)
async def test_a_departure_from_the_order_is_told_apart(node, messages, status):
    async with node.runtime.live():
        job = await node.start()
        await job.ready()
        for message in messages:
            payload = message if isinstance(message, bytes) else message.SerializeToString()
            await job.send_raw(frame(payload))
        _, done = await job.outcome()
        assert app_pb2.Status.Name(done.status) == f"STATUS_{status}"
        assert await job.exit_code() == 0


async def test_a_message_after_the_last_part_ends_the_request(node):
    async with node.runtime.live() as runtime:
        runtime.answer = silent
        job = await node.start()
        await job.ready()
        await job.ask(request_pb2.InferenceRequest(prompt="x"))
        await job.send(PART)
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_PROTOCOL_ERROR
        assert await job.exit_code() == 0


@pytest.mark.parametrize("cut", ["between messages", "in a length", "in a message"])
async def test_a_request_cut_short_is_a_protocol_error(node, cut):
    async with node.runtime.live():
        job = await node.start()
        await job.ready()
        await job.open()
        await job.send(PART)
        whole = frame(PART.SerializeToString())
        await job.send_raw({"between messages": b"", "in a length": whole[:2], "in a message": whole[:-1]}[cut])
        job.writer.write_eof()
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_PROTOCOL_ERROR
        assert await job.exit_code() == 0


async def test_an_oversized_message_is_refused_unread_while_the_peer_still_writes(node):
    async with node.runtime.live():
        job = await node.start()
        await job.ready()
        await job.open()
        job.writer.write(PREFIX.pack(node.config.app.max_message_bytes + 1) + bytes(node.config.app.max_message_bytes))
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_REQUEST_TOO_LARGE
        assert str(node.config.app.max_message_bytes) in done.detail
        assert await job.exit_code() == 0


@pytest.mark.parametrize("by", ["node", "open"])
async def test_an_oversized_request_is_refused(node, by):
    node.configure(max_request_bytes=1000 if by == "node" else 10**6)
    limits = app_pb2.Limits(max_request_bytes=0 if by == "node" else 1000)
    async with node.runtime.live():
        job = await node.start()
        await job.ready()
        await job.ask(request_pb2.InferenceRequest(prompt="x" * 2000), piece=400, limits=limits)
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_REQUEST_TOO_LARGE
        assert "1000" in done.detail


async def test_a_request_that_stops_arriving_is_given_up(node):
    node.configure(idle_timeout_s=0.2)
    async with node.runtime.live():
        job = await node.start()
        await job.ready()
        await job.open()
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_DEADLINE_EXCEEDED
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
    job = await node.start()
    await job.ready()
    await job.ask(request_pb2.InferenceRequest(prompt="x"), **fields)
    message = await job.receive()
    assert message is not None
    assert message.delta.text == "first"
    return job


async def test_the_time_limit_counts_from_open(node):
    async with node.runtime.live() as runtime:
        runtime.answer = silent
        job = await node.start()
        await job.ready()
        await job.ask(request_pb2.InferenceRequest(prompt="x"), limits=app_pb2.Limits(time_limit_ms=300))
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
        await asyncio.wait_for(runtime.cancelled.wait(), 5)


async def test_a_request_that_the_node_ends_is_told_as_cancelled(node, tokenizer):
    async def answer(request):
        yield node.runtime.tokens(0, tokenizer.encode("ab"))
        yield node.runtime.finished(0, runtime_pb2.REASON_CANCELLED, completion_tokens=2)

    async with node.runtime.live() as runtime:
        runtime.answer = answer
        job = await node.start()
        await job.ready()
        await job.ask(request_pb2.InferenceRequest(prompt="x"))
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
        job = await node.start()
        await job.ready()
        await job.ask(request_pb2.InferenceRequest(prompt="x"))
        texts, done = await job.outcome()
        assert texts == {0: "ab"}
        assert (done.status, done.detail) == (app_pb2.STATUS_REPLACED, "the node had to restart: send it again")
        assert done.finish[0].reason == app_pb2.FINISH_CANCELLED
        assert done.usage.completion_tokens == 2


async def test_the_runtime_s_death_in_mid_stream_is_told_within_two_seconds(node, tokenizer):
    async with node.runtime.live() as runtime:
        job = await streaming(node, tokenizer)
        runtime.die()
        _, done = await asyncio.wait_for(job.outcome(), 2)
        assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE
        assert done.finish[0].reason == app_pb2.FINISH_ERROR
        assert await job.exit_code() == 0


async def test_triton_s_death_in_mid_stream_is_told_as_well(node, tokenizer):
    async with node.runtime.live():
        job = await streaming(node, tokenizer)
    _, done = await asyncio.wait_for(job.outcome(), 2)
    assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE


async def test_the_jobhelper_s_death_ends_the_process_and_the_generation(node, tokenizer):
    async with node.runtime.live() as runtime:
        job = await streaming(node, tokenizer)
        job.writer.transport.abort()
        assert await asyncio.wait_for(job.exit_code(), 2) == 0
        await asyncio.wait_for(runtime.cancelled.wait(), 5)


async def test_a_termination_signal_ends_a_request_with_busy(node, tokenizer):
    async with node.runtime.live():
        job = await streaming(node, tokenizer)
        os.kill(job.process.pid, signal.SIGTERM)
        _, done = await asyncio.wait_for(job.outcome(), 2)
        assert done.status == app_pb2.STATUS_BUSY
        assert await job.exit_code() == 0


async def test_a_killed_app_shows_as_a_stream_that_ends_without_done(node, tokenizer):
    async with node.runtime.live() as runtime:
        job = await streaming(node, tokenizer)
        os.kill(job.process.pid, signal.SIGKILL)
        assert await job.receive() is None
        await asyncio.wait_for(runtime.cancelled.wait(), 5)


async def test_an_unused_app_leaves_when_the_runtime_goes_and_says_why(node):
    async with node.runtime.live() as runtime:
        job = await node.start()
        await job.ready()
        runtime.die()
        _, done = await asyncio.wait_for(job.outcome(), 2)
        assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE
        assert await job.exit_code() == 0


CODES = {
    runtime_pb2.CODE_INVALID: "INVALID_REQUEST",
    runtime_pb2.CODE_PROMPT_TOO_LONG: "PROMPT_TOO_LONG",
    runtime_pb2.CODE_BUSY: "BUSY",
    runtime_pb2.CODE_DRAINING: "BUSY",
    runtime_pb2.CODE_DEADLINE: "DEADLINE_EXCEEDED",
    runtime_pb2.CODE_GRAMMAR: "GRAMMAR_REFUSED",
    runtime_pb2.CODE_IMAGE: "IMAGE_REFUSED",
    runtime_pb2.CODE_UNSUPPORTED: "UNSUPPORTED",
    runtime_pb2.CODE_INTERNAL: "INTERNAL",
    99: "INTERNAL",
}


@pytest.mark.parametrize(("code", "status"), CODES.items())
async def test_the_runtime_s_refusals_keep_their_meaning(node, code, status):
    async def answer(request):
        yield node.runtime.failed(code, "said by the runtime")

    async with node.runtime.live() as runtime:
        runtime.answer = answer
        job = await node.start()
        await job.ready()
        await job.ask(request_pb2.InferenceRequest(prompt="x"))
        _, done = await job.outcome()
        assert app_pb2.Status.Name(done.status) == f"STATUS_{status}"
        assert done.detail == "said by the runtime"


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
        job = await node.start()
        await job.ready()
        await job.ask(request_pb2.InferenceRequest(prompt="x"))
        texts, done = await job.outcome()
        assert texts == {0: "abc"}
        assert done.status == app_pb2.STATUS_INTERNAL
        assert await job.exit_code() == 1
        assert "ProtocolError" in await job.log()


async def test_without_a_runtime_the_app_says_so_and_is_never_ready(node):
    job = await node.start()
    _, done = await job.outcome()
    assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE
    assert await job.exit_code() == 0


async def test_a_runtime_that_greets_but_does_not_answer_is_not_waited_for_long(node):
    node.configure(start_deadline_s=0.3)
    async with node.runtime.live() as runtime:
        node.config.sockets.triton.unlink()
        job = await node.start()
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE
        assert runtime.streams == 0


async def test_a_runtime_of_another_release_would_speak_another_vocabulary(node):
    async with node.runtime.live() as runtime:
        runtime.hello.release = "other"
        job = await node.start()
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE
        assert "app.other-release" in await job.log()


async def test_a_missing_bundle_is_told_and_logged(node):
    (node.directory / "node.toml").write_text(f'run_dir = "{node.directory}"\n[model]\nbundle = "/nonexistent"\n')
    async with node.runtime.live():
        job = await node.start()
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_INTERNAL
        assert await job.exit_code() == 1
        assert "BundleError" in await job.log()


async def test_nothing_of_a_request_reaches_the_log(node, tokenizer):
    async def answer(request):
        yield node.runtime.tokens(0, tokenizer.encode(SECRET))
        raise ValueError(SECRET)

    async with node.runtime.live() as runtime:
        runtime.answer = answer
        for body in (
            request_pb2.InferenceRequest(prompt=SECRET, stop=[SECRET]),
            request_pb2.InferenceRequest(prompt=SECRET, model=SECRET),
            constraint(lark=f"start: {SECRET}"),
            constraint(json_schema=f'{{"type": "{SECRET}"}}'),
            SECRET.encode() * 10,
        ):
            job = await node.start()
            await job.ready()
            await job.ask(body, request_id=f"{SECRET} with spaces")
            _, done = await job.outcome()
            assert done.status != app_pb2.STATUS_OK
            await job.exit_code()
            log = await job.log()
            assert "app.done" in log
            assert SECRET not in log


@pytest.mark.parametrize(
    ("environment", "says"),
    [({}, "connection"), ({"LISTEN_FDS": "1", "LISTEN_PID": "1"}, "connection")],
    ids=["not activated", "meant for another process"],
)
def test_started_by_hand_it_says_how_it_is_started(tmp_path, environment, says):
    app = Path(sysconfig.get_path("scripts")) / "tie-cloud-app"
    (tmp_path / "node.toml").write_text("")
    result = subprocess.run(
        [app, "--config", tmp_path / "node.toml"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert result.returncode == EXIT_CONFIG
    assert says in result.stderr


def test_it_has_help_and_a_version():
    app = Path(sysconfig.get_path("scripts")) / "tie-cloud-app"
    for option in ("--help", "--version"):
        result = subprocess.run([app, option], capture_output=True, text=True, timeout=20, check=True)
        assert "tie-cloud-app" in result.stdout


def test_the_process_confines_itself(tmp_path):
    # In a process of its own: limits cannot be raised again.
    code = (
        "import ctypes, resource; from tie.app import main; main._confine();"
        "print(resource.getrlimit(resource.RLIMIT_FSIZE), resource.getrlimit(resource.RLIMIT_CORE),"
        " ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert result.stdout == "(0, 0) (0, 0) 0\n"


async def test_a_jobhelper_that_stays_connected_does_not_keep_the_process(node):
    async with node.runtime.live():
        job = await node.start()
        await job.ready()
        await job.open(model="other")
        while (message := await job.receive()) is not None:
            assert message.done.status == app_pb2.STATUS_UNKNOWN_MODEL
        assert await asyncio.wait_for(job.exit_code(), 5) == 0
