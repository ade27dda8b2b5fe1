"""Conversations of a user's device: what was said, and the turn key that lets the node reuse its work on it.

The key is drawn here, sent inside each sealed request, and kept nowhere else: a node that has answered cannot open what
it kept of the conversation until the key comes again. Whoever loses the key loses time at the next turn, nothing else.
"""

import secrets
from collections.abc import Iterable, Sequence
from typing import Final

from tie.device.request import Message, Options, with_images

TURN_KEY_BYTES: Final = 32


class Conversation:
    """One conversation, in memory.

    Attributes:
        messages: what was said.

    Args:
        beginning: messages to begin with, for example a system message.
        reusable: whether it has a turn key; without, nothing of it can be reused.
    """

    def __init__(self, beginning: Iterable[Message] = (), *, reusable: bool = True) -> None:
        self.messages: list[Message] = list(beginning)
        self._turn_key = secrets.token_bytes(TURN_KEY_BYTES) if reusable else b""

    def asking(self, text: str, images: Sequence[bytes] = ()) -> list[Message]:
        """The messages to send for a turn; the conversation itself stays as it is until `answered`."""
        return [*self.messages, _asked(text, images)]

    def answered(self, text: str, answer: str, images: Sequence[bytes] = ()) -> None:
        """Adds a whole turn."""
        self.messages += [_asked(text, images), {"role": "assistant", "content": answer}]

    @property
    def options(self) -> Options:
        """What goes into each of its requests beside the messages."""
        return Options(turn_key=self._turn_key) if self._turn_key else Options()

    def __repr__(self) -> str:
        return f"<Conversation of {len(self.messages)} messages>"


def _asked(text: str, images: Sequence[bytes]) -> Message:
    return with_images(text, images) if images else {"role": "user", "content": text}
