"""A bad request has its own status, padded like everything else; the process ends and nothing hangs."""

import asyncio

import pytest

from tie.daemon.frames import PREFIX, frame
from tie.proto import app_pb2, request_pb2, runtime_pb2

SECRET = "xyzzy-planted-secret"


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
        job = await node.asked(body)
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
        job = await node.asked(request_pb2.InferenceRequest(prompt="x" * 2000), piece=400, limits=limits)
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
        job = await node.asked(request_pb2.InferenceRequest(prompt="x"))
        _, done = await job.outcome()
        assert app_pb2.Status.Name(done.status) == f"STATUS_{status}"
        assert done.detail == "said by the runtime"


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
            job = await node.asked(body, request_id=f"{SECRET} with spaces")
            _, done = await job.outcome()
            assert done.status != app_pb2.STATUS_OK
            await job.exit_code()
            log = await job.log()
            assert "app.done" in log
            assert SECRET not in log


async def test_a_jobhelper_that_stays_connected_does_not_keep_the_process(node):
    async with node.runtime.live():
        job = await node.start()
        await job.ready()
        await job.open(model="other")
        while (message := await job.receive()) is not None:
            assert message.done.status == app_pb2.STATUS_UNKNOWN_MODEL
        async with asyncio.timeout(5):
            assert await job.exit_code() == 0
