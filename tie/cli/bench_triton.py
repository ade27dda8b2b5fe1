"""Asks the engine behind Triton with token ids: no device, envelope, ingress or app, for the comparison with them.

Needs the node's packages and its run directory; `tie bench --target triton` imports it.
"""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from tie.assets.bundle import open_bundle
from tie.assets.chat import ChatMessage, ChatTemplate
from tie.cli import settings
from tie.cli.bench_load import Call, Heard, Usage
from tie.daemon.errors import PeerError
from tie.daemon.triton import TritonClient
from tie.device.errors import NodeBusyError, RequestRefusedError
from tie.proto import runtime_pb2

_READY_S = 10.0


class TritonTarget:
    """A live Triton, and the template that an app would have used."""

    def __init__(self, client: TritonClient, template: ChatTemplate) -> None:
        self._client = client
        self._template = template

    async def ask(self, call: Call, heard: Heard) -> Usage:
        """See `bench_load.Target`. A piece is an event: one token, or the few that a busy server gathered."""
        request = generate_request(call, self._template)
        completion_tokens = 0
        async with aclosing(self._client.generate(request, timeout=call.timeout_s)) as events:
            async for event in events:
                completion_tokens += take(event, time.monotonic(), heard)
        return Usage(len(request.token_ids), completion_tokens)


@asynccontextmanager
async def triton(run_dir: Path) -> AsyncIterator[TritonTarget]:
    """The Triton of the node that runs in `run_dir`.

    Raises:
        ConfigError: no node runs there.
        PeerError: its Triton does not answer.
    """
    config = settings.load_running(run_dir)
    template = ChatTemplate.load(open_bundle(Path(config.model.bundle)))
    async with TritonClient(config.sockets.triton) as client:
        if not await client.ready(timeout=_READY_S):
            raise PeerError("the node's Triton does not answer")
        yield TritonTarget(client, template)


def generate_request(call: Call, template: ChatTemplate) -> runtime_pb2.GenerateRequest:
    """What an app would ask the runtime for."""
    messages = [
        ChatMessage(role=message["role"], content=message["content"])  # type: ignore[arg-type] # checked by the template
        for message in call.prompt.messages
    ]
    return runtime_pb2.GenerateRequest(
        token_ids=template.encode(messages),
        sampling=runtime_pb2.Sampling(temperature=call.temperature, seed=call.seed),
        max_tokens=call.max_tokens,
        ignore_eos=call.ignore_eos,
    )


def take(event: runtime_pb2.GenerateEvent, at: float, heard: Heard) -> int:
    """Tells of an event's tokens; how many the answer has if this is its end, else 0.

    Raises:
        NodeBusyError: the queue is full, or the runtime is about to go.
        RequestRefusedError: any other failure.
        PeerError: the runtime gave the request up.
    """
    if event.HasField("failed"):
        if event.failed.code in {runtime_pb2.CODE_BUSY, runtime_pb2.CODE_DRAINING}:
            raise NodeBusyError("the runtime takes no requests now")
        code = runtime_pb2.Code.Name(event.failed.code).removeprefix("CODE_").lower()
        raise RequestRefusedError("the runtime refused the request", status=code)
    if event.HasField("finished"):
        if event.finished.reason == runtime_pb2.REASON_CANCELLED:
            raise PeerError("the runtime gave the request up")
        return event.finished.completion_tokens
    heard(at, len(event.tokens.token_ids))
    return 0
