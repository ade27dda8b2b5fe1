"""What servers under test do with an exchange."""

from collections.abc import Awaitable, Callable
from typing import Final

from tie.cloudboard.replies import reply
from tie.http.exchange import Exchange
from tie.http.limits import Pace
from tie.http.reply import RefusedRequestError

DEADLINE_S: Final = 60.0
PACE: Final = Pace(idle_s=DEADLINE_S, whole_s=DEADLINE_S)


async def echo(exchange: Exchange) -> None:
    """Answers with the request's body."""
    body = b"".join([chunk async for chunk in exchange.chunks(PACE)])
    await exchange.start("text/plain")
    await exchange.write(body)
    await exchange.finish()


async def answer(exchange: Exchange, handler: Callable[[Exchange], Awaitable[None]] = echo) -> None:
    """Has `handler` answer, and says its refusals."""
    try:
        await handler(exchange)
    except RefusedRequestError as refusal:
        await exchange.reply(reply(refusal.code))
