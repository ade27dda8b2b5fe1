"""The asynchronous twin of tie.device.client."""

import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from pathlib import Path
from typing import Self, Unpack

import httpx

from tie.device import transport
from tie.device.answer import Delta, Result
from tie.device.errors import EnvelopeRefusedError
from tie.device.nodes import Node, Nodes
from tie.device.request import Message, Options, build
from tie.device.session import Session, reply_error
from tie.device.transport import Stage, mapped
from tie.device.trust import MAX_REPLY_BYTES, Trust
from tie.envelope.statement import NodeKey
from tie.proto import request_pb2


class AsyncClient:
    """Talks to a node's ingress, or to the first of several that takes the request.

    async with AsyncClient("http://127.0.0.1:8443", "statement.pub") as client:
        answer = await client.chat([{"role": "user", "content": "Hello"}], model="smollm2")
        async for delta in answer:
            print(delta.text, end="")
    """

    def __init__(
        self,
        url: str | Iterable[str],
        statement_key: bytes | str | Path | None = None,
        *,
        trust_on_first_use: bool = False,
        silence_s: float = 120.0,
    ) -> None:
        """Connects to nothing yet. Arguments and errors as `tie.device.client.Client`."""
        self._trust = Trust(statement_key, trust_on_first_use=trust_on_first_use)
        self._nodes = Nodes(url, silence_s, self._trust)
        self._answers: weakref.WeakSet[AsyncAnswer] = weakref.WeakSet()

    @property
    def statement_key(self) -> bytes | None:
        """The statement key in use: worth keeping after a first use."""
        return self._trust.pinned

    async def chat(self, messages: Iterable[Message], *, model: str, **options: Unpack[Options]) -> "AsyncAnswer":
        """Asks with a conversation. See `send`."""
        return await self.send(build(model=model, messages=messages, **options))

    async def complete(self, prompt: str, *, model: str, **options: Unpack[Options]) -> "AsyncAnswer":
        """Asks for the continuation of raw text. See `send`."""
        return await self.send(build(model=model, prompt=prompt, **options))

    async def send(self, request: request_pb2.InferenceRequest) -> "AsyncAnswer":
        """Seals and sends `request`; returns when a node has accepted it.

        Raises:
            TieError: none did; tie.device.errors lists how.
        """
        attempts = self._nodes.attempts()
        for node in attempts:
            with attempts.at(node):
                return await self._send(node, request)
        raise attempts.error

    async def node(self) -> NodeKey:
        """The node's verified key, fetched when there is none that still holds.

        Raises:
            StatementError: the node's statement is not to be believed.
            TieError: it cannot be fetched.
        """
        return await self._key(self._nodes.first)

    async def close(self) -> None:
        """Stops the answers that are still on their way."""
        for answer in list(self._answers):
            await answer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(self, node: Node, request: request_pb2.InferenceRequest) -> "AsyncAnswer":
        try:
            return await self._post(node, request)
        except EnvelopeRefusedError as error:
            if not node.outdated(error):
                raise
        return await self._post(node, request)

    async def _key(self, node: Node) -> NodeKey:
        known = node.key
        if known is not None:
            return known
        if self._trust.pinned is None:
            self._trust.pin(await self._get(node, transport.STATEMENT_KEY_PATH))
        return node.accept(await self._get(node, transport.NODE_PATH))

    async def _get(self, node: Node, path: str) -> bytes:
        with mapped(Stage.ASKING):
            async with (
                node.address.async_client() as http,
                http.stream("GET", path, timeout=transport.STATEMENT_S) as response,
            ):
                await _require_ok(response)
                return await _read_all(response)

    async def _post(self, node: Node, request: request_pb2.InferenceRequest) -> "AsyncAnswer":
        session = Session(await self._key(node), request)
        http = node.address.async_client()
        try:
            with mapped(Stage.SENDING):
                outgoing = http.build_request("POST", transport.REQUESTS_PATH, content=session.body)
                response = await http.send(outgoing, stream=True)
                await _require_ok(response)
        except BaseException:
            session.close()
            await http.aclose()
            raise
        answer = AsyncAnswer(http, response, session)
        self._answers.add(answer)
        return answer


class AsyncAnswer:
    """An answer on its way: iterate it for its pieces. Closing it early stops the node's work on it."""

    def __init__(self, http: httpx.AsyncClient, response: httpx.Response, session: Session) -> None:
        self._http = http
        self._response = response
        self._session = session
        self._pieces = self._read()

    async def result(self) -> Result:
        """How the answer ended; reads it to its end first. Raises as iteration does."""
        async for _ in self._pieces:
            pass
        return self._session.end()

    async def close(self) -> None:
        """Stops the answer."""
        await self._pieces.aclose()
        self._session.close()
        await self._http.aclose()

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The pieces.

        Raises:
            TieError: the answer ended badly; tie.device.errors lists how.
        """
        return self._pieces

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read(self) -> AsyncGenerator[Delta, None]:
        try:
            with mapped(Stage.ANSWERING):
                async for data in self._response.aiter_raw():
                    for delta in self._session.feed(data):
                        yield delta
            self._session.end()
        finally:
            self._session.close()
            await self._http.aclose()


async def _require_ok(response: httpx.Response) -> None:
    """Raises the error that a reply stands for, unless it is 200."""
    if response.status_code != httpx.codes.OK:
        raise reply_error(await _read_all(response))


async def _read_all(response: httpx.Response) -> bytes:
    """A short reply's body; what is over the limit is cut."""
    body = b""
    async for data in response.aiter_raw():
        body += data
        if len(body) > MAX_REPLY_BYTES:
            break
    return body
