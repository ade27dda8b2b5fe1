"""The synchronous client of a node: `Client(url, statement_key).chat(messages, model=…)` streams an answer."""

import weakref
from collections.abc import Generator, Iterable, Iterator
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


class Client:
    """Talks to a node's ingress, or to the first of several that takes the request.

    Safe to use from several threads, one answer each.

    with Client("http://127.0.0.1:8443", "statement.pub") as client:
        for delta in client.chat([{"role": "user", "content": "Hello"}], model="smollm2"):
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
        """Connects to nothing yet.

        Args:
            url: of the ingress; or several, of nodes of one fleet. A request goes to the next one when the one before
                it is busy or not there: when nothing of it can have been read, and in no other case.
            statement_key: the fleet's public statement key: 32 bytes, or the path of `statement.pub`.
            trust_on_first_use: without a `statement_key`, believe the first one that the ingress gives.
            silence_s: the longest time without a byte of an answer.

        Raises:
            ConfigError: neither a statement key nor permission to trust one, or the file is no such key.
        """
        self._trust = Trust(statement_key, trust_on_first_use=trust_on_first_use)
        self._nodes = Nodes(url, silence_s, self._trust)
        self._answers: weakref.WeakSet[Answer] = weakref.WeakSet()

    @property
    def statement_key(self) -> bytes | None:
        """The statement key in use: worth keeping after a first use."""
        return self._trust.pinned

    def chat(self, messages: Iterable[Message], *, model: str, **options: Unpack[Options]) -> "Answer":
        """Asks with a conversation. See `send`."""
        return self.send(build(model=model, messages=messages, **options))

    def complete(self, prompt: str, *, model: str, **options: Unpack[Options]) -> "Answer":
        """Asks for the continuation of raw text. See `send`."""
        return self.send(build(model=model, prompt=prompt, **options))

    def send(self, request: request_pb2.InferenceRequest) -> "Answer":
        """Seals and sends `request`; returns when a node has accepted it.

        Raises:
            TieError: none did; tie.device.errors lists how.
        """
        attempts = self._nodes.attempts()
        for node in attempts:
            with attempts.at(node):
                return self._send(node, request)
        raise attempts.error

    def node(self) -> NodeKey:
        """The node's verified key, fetched when there is none that still holds.

        Raises:
            StatementError: the node's statement is not to be believed.
            TieError: it cannot be fetched.
        """
        return self._key(self._nodes.first)

    def close(self) -> None:
        """Stops the answers that are still on their way."""
        for answer in list(self._answers):
            answer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, node: Node, request: request_pb2.InferenceRequest) -> "Answer":
        try:
            return self._post(node, request)
        except EnvelopeRefusedError as error:
            if not node.outdated(error):
                raise
        return self._post(node, request)

    def _key(self, node: Node) -> NodeKey:
        known = node.key
        if known is not None:
            return known
        if self._trust.pinned is None:
            self._trust.pin(self._get(node, transport.STATEMENT_KEY_PATH))
        return node.accept(self._get(node, transport.NODE_PATH))

    def _get(self, node: Node, path: str) -> bytes:
        with (
            mapped(Stage.ASKING),
            node.address.client() as http,
            http.stream("GET", path, timeout=transport.STATEMENT_S) as response,
        ):
            _require_ok(response)
            return _read_all(response)

    def _post(self, node: Node, request: request_pb2.InferenceRequest) -> "Answer":
        session = Session(self._key(node), request)
        http = node.address.client()
        try:
            with mapped(Stage.SENDING):
                outgoing = http.build_request("POST", transport.REQUESTS_PATH, content=session.body)
                response = http.send(outgoing, stream=True)
                _require_ok(response)
        except BaseException:
            session.close()
            http.close()
            raise
        answer = Answer(http, response, session)
        self._answers.add(answer)
        return answer


class Answer:
    """An answer on its way: iterate it for its pieces. Closing it early stops the node's work on it."""

    def __init__(self, http: httpx.Client, response: httpx.Response, session: Session) -> None:
        self._http = http
        self._response = response
        self._session = session
        self._pieces = self._read()

    def result(self) -> Result:
        """How the answer ended; reads it to its end first. Raises as iteration does."""
        for _ in self._pieces:
            pass
        return self._session.end()

    def close(self) -> None:
        """Stops the answer."""
        self._pieces.close()
        self._session.close()
        self._http.close()

    def __iter__(self) -> Iterator[Delta]:
        """The pieces.

        Raises:
            TieError: the answer ended badly; tie.device.errors lists how.
        """
        return self._pieces

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Generator[Delta, None, None]:
        try:
            with mapped(Stage.ANSWERING):
                for data in self._response.iter_raw():
                    yield from self._session.feed(data)
            self._session.end()
        finally:
            self._session.close()
            self._http.close()


def _require_ok(response: httpx.Response) -> None:
    """Raises the error that a reply stands for, unless it is 200."""
    if response.status_code != httpx.codes.OK:
        raise reply_error(_read_all(response))


def _read_all(response: httpx.Response) -> bytes:
    """A short reply's body; what is over the limit is cut."""
    body = b""
    for data in response.iter_raw():
        body += data
        if len(body) > MAX_REPLY_BYTES:
            break
    return body
