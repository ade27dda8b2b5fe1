"""Users of a node under test: each asks again and again, and what became of every request is written down."""

import asyncio
import random
import time
from dataclasses import dataclass, field

from tie.daemon.errors import TieError
from tie.device.async_client import AsyncClient
from tie.device.errors import NodeBusyError

ANSWER_S = 120.0
_BUSY_PAUSE_S = 0.2
WORDS = ("river", "stone", "light", "seven", "garden", "window", "paper", "north")


@dataclass
class Request:
    """One request, on the monotonic clock.

    Attributes:
        accepted: when the node had taken it; None when it did not.
        outcome: "ok", "busy", or the name of an error with its status.
    """

    sent: float
    accepted: float | None = None
    ended: float = 0.0
    outcome: str = ""


@dataclass
class Users:
    """Several users at once, until told to stop."""

    client: AsyncClient
    model: str
    count: int
    seed: int
    longest: int = 60
    requests: list[Request] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Asks until `stopping`; running requests end first."""
        sources = [random.Random(f"{self.seed}/{user}") for user in range(self.count)]  # noqa: S311 (replayable)
        await asyncio.gather(*(self._user(source) for source in sources))

    async def _user(self, source: random.Random) -> None:
        while not self.stopping.is_set():
            request = Request(time.monotonic())
            tokens = source.randint(4, self.longest)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._ask(request, tokens, " ".join(source.choices(WORDS, k=source.randint(1, 30))))
            except NodeBusyError:
                request.outcome = "busy"
            except (TieError, TimeoutError) as error:
                request.outcome = f"{type(error).__name__} {getattr(error, 'status', '')}".strip()
            request.ended = time.monotonic()
            self.requests.append(request)
            if request.outcome != "ok":
                await asyncio.sleep(_BUSY_PAUSE_S)

    async def _ask(self, request: Request, tokens: int, text: str) -> None:
        messages = [{"role": "user", "content": text}]
        answer = await self.client.chat(messages, model=self.model, max_tokens=tokens, ignore_eos=True)
        request.accepted = time.monotonic()
        result = await answer.result()
        request.outcome = "ok" if result.completion_tokens == tokens else f"cut after {result.completion_tokens}"

    def counts(self) -> dict[str, int]:
        """How many requests had each outcome."""
        found: dict[str, int] = {}
        for request in self.requests:
            found[request.outcome] = found.get(request.outcome, 0) + 1
        return found
