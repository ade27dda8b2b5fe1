"""Recognises conversations that continue, by what was said, and keeps a turn key for each. In memory only.

Clients of OpenAI's API send the whole conversation with every request and name it by nothing. A chain of hashes over
its messages is a name: what a conversation was when an answer had been given to it is found again when it comes back
with more. The hash has a key of this process, so that nobody can look for guessed words in its memory.

Whoever is not recognised gets a fresh key and loses time, nothing else. A key that is found wrongly does no harm
either: a node reuses only what begins with the very same tokens (docs/warden.md).
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from tie.device.conversations import TURN_KEY_BYTES
from tie.proto import request_pb2

MAX_TURNS: Final = 4096
_ASSISTANT: Final = "assistant"


class Turns:
    """The turns of many conversations, those used last; a turn that is forgotten costs time at the next one."""

    def __init__(self, most: int = MAX_TURNS) -> None:
        self._most = most
        self._secret = secrets.token_bytes(32)
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<Turns: {len(self)}>"

    def key(self, request: request_pb2.InferenceRequest) -> bytes:
        """The turn key of a request's conversation: that of its latest turn that is known here, else a fresh one."""
        _, *names = self._names(request)
        for name, message in zip(reversed(names), reversed(request.messages), strict=True):
            if message.role == _ASSISTANT and name in self._keys:
                self._keys.move_to_end(name)
                return self._keys[name]
        return secrets.token_bytes(TURN_KEY_BYTES)

    def answered(self, request: request_pb2.InferenceRequest, answers: Sequence[request_pb2.Message]) -> None:
        """Remembers the turn that an answer ends, once for each of its choices. `request` has its turn key."""
        *_, asked = self._names(request)
        for answer in answers:
            name = self._hash(asked, _essence(answer))
            self._keys[name] = request.turn_key
            self._keys.move_to_end(name)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def _names(self, request: request_pb2.InferenceRequest) -> Iterator[bytes]:
        """The conversation's name before its first message and after each."""
        name = self._hash(request.model.encode())
        yield name
        for message in request.messages:
            name = self._hash(name, _essence(message))
            yield name

    def _hash(self, *parts: bytes) -> bytes:
        digest = hashlib.blake2b(key=self._secret, digest_size=32)
        for part in parts:
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return digest.digest()


def _essence(message: request_pb2.Message) -> bytes:
    """What clients send back as they got it: not ids of calls, nor the space around a text, nor how it is parted."""
    kept = request_pb2.Message(role=message.role, tool_calls=message.tool_calls)
    for call in kept.tool_calls:
        call.id = ""
    text = "".join(part.text for part in message.parts).strip()
    images = [part for part in message.parts if part.HasField("image")]
    kept.parts.extend([request_pb2.Part(text=text), *images])
    return kept.SerializeToString(deterministic=True)
