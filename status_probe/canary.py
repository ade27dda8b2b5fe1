"""The canary: one token of a constrained, streamed inference through the real Triton, with a deadline.

It is the only sign of a runtime that is alive but stuck, and it leaves streaming and constrained decoding warm before
anybody hears "ready". The engine puts it ahead of every request and gives it room of its own, so load does not fail it.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Final

from tie.daemon.errors import PeerDiedError, PeerError, PeerTimeoutError
from tie.daemon.triton import TritonClient
from tie.proto import runtime_pb2

TIMEOUT: Final = "canary-timeout"


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """How one canary went.

    Attributes:
        at: when it ended, on the monotonic clock, seconds.
        latency_s: how long it took.
        error: a stable code; empty when it passed.
        progress: the engine has computed a step meanwhile.
    """

    at: float
    latency_s: float
    error: str
    progress: bool = False

    @property
    def ok(self) -> bool:
        """Whether a token came back in time."""
        return not self.error

    @property
    def late(self) -> bool:
        """Whether it only came late: the engine was at work for others."""
        return self.error == TIMEOUT and self.progress


async def fly(client: TritonClient, token_id: int, *, deadline_s: float) -> CanaryResult:
    """Runs one canary. Never raises for what the runtime does.

    Args:
        client: connected to the runtime's Triton.
        token_id: the prompt: any token of the vocabulary.
        deadline_s: seconds for the whole inference.
    """
    began = time.monotonic()
    error = ""
    try:
        async with asyncio.timeout(deadline_s):
            error = await _infer(client, token_id, deadline_s)
    except (TimeoutError, PeerTimeoutError):
        error = TIMEOUT
    except PeerDiedError:
        error = "canary-died"
    except PeerError:
        error = "canary-protocol"
    ended = time.monotonic()
    return CanaryResult(at=ended, latency_s=ended - began, error=error)


async def _infer(client: TritonClient, token_id: int, deadline_s: float) -> str:
    request = runtime_pb2.GenerateRequest(
        request_id="canary", token_ids=[token_id], grammar="", max_tokens=1, canary=True
    )
    finished: runtime_pb2.Finished | None = None
    async with contextlib.aclosing(client.generate(request, timeout=deadline_s)) as events:
        async for event in events:
            if event.HasField("failed"):
                return "canary-refused"
            if event.HasField("finished"):
                finished = event.finished
    return "" if finished is not None and finished.completion_tokens == 1 else "canary-no-token"
