"""The nodes that a client may ask: in which order, and when another one may be asked instead."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from tie.daemon.errors import ConfigError, TieError
from tie.device.errors import EnvelopeRefusedError, NodeBusyError, UnreachableError
from tie.device.transport import Address
from tie.device.trust import Trust
from tie.envelope.statement import NodeKey

_HINT: Final = "for example http://127.0.0.1:8443"
_REKEYED: Final = "unknown_key"  # the ingress's code of an envelope that is sealed to a key which is no more


class Node:
    """One node.

    Attributes:
        address: of its ingress.
    """

    def __init__(self, address: Address, trust: Trust) -> None:
        self.address = address
        self._trust = trust
        self._key: NodeKey | None = None

    @property
    def key(self) -> NodeKey | None:
        """The node's verified key, as long as its statement is good for some time yet."""
        return self._key if self._key is not None and self._trust.holds(self._key) else None

    def accept(self, received: bytes) -> NodeKey:
        """Verifies a statement and remembers it. Raises as `Trust.verify`."""
        self._key = self._trust.verify(received)
        return self._key

    def outdated(self, refusal: EnvelopeRefusedError) -> bool:
        """Whether the node has another key now than the one sealed to, which then is forgotten.

        It was replaced before anything was opened: the request may be sealed once more, to the new one and under a new
        DEK.
        """
        if refusal.code != _REKEYED:
            return False
        self._key = None
        return True


class Nodes:
    """All of them, those that answered last in front."""

    def __init__(self, urls: str | Iterable[str], silence_s: float, trust: Trust) -> None:
        """Checks the addresses.

        Raises:
            ConfigError: there is none, or one is none.
        """
        several = [urls] if isinstance(urls, str) else list(urls)
        if not several:
            raise ConfigError("no node to ask", hint=_HINT)
        self._order = [Node(Address(url, silence_s), trust) for url in several]

    @property
    def first(self) -> Node:
        """The one to ask first."""
        return self._order[0]

    def attempts(self) -> "Attempts":
        """Whom to ask, one after another."""
        return Attempts(self, list(self._order))

    def prefer(self, node: Node) -> None:
        """It has taken a request: the next one begins with it, and what it keeps of a conversation is of use."""
        order = [node, *(other for other in self._order if other is not node)]
        self._order = order


class Attempts:
    """One request's way from node to node, until one has taken it.

    for node in attempts:
        with attempts.at(node):
            return send(node)
    raise attempts.error
    """

    def __init__(self, nodes: Nodes, order: list[Node]) -> None:
        self._nodes = nodes
        self._order = order
        self._refusals: list[TieError] = []

    def __iter__(self) -> Iterator[Node]:
        """The nodes in their order."""
        return iter(self._order)

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """One attempt: a refusal ends the block and no more, where another node may get the request."""
        try:
            yield
        except TieError as error:
            if not untouched(error):
                raise
            self._refusals.append(error)
        else:
            self._nodes.prefer(node)

    @property
    def error(self) -> TieError:
        """Why none took it: that one is busy says more than that another is not there."""
        return next((error for error in self._refusals if isinstance(error, NodeBusyError)), self._refusals[0])


def untouched(error: TieError) -> bool:
    """Whether nobody can have read anything of the request whose sending failed so: only then may another node get it.

    "busy" is said before the envelope is opened, and one that is sealed to a key which the node no longer has cannot be
    opened. A connection that broke tells nothing once the request was on its way.
    """
    match error:
        case NodeBusyError():
            return True
        case EnvelopeRefusedError():
            return error.code == _REKEYED
        case UnreachableError():
            return not error.sent
        case _:
            return False
