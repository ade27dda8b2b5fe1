"""Conversations: a key of their own, the same at each turn, shown nowhere."""

import pytest

from tie.device.conversations import TURN_KEY_BYTES, Conversation
from tie.device.request import build


def test_a_turn_is_added_when_it_is_answered():
    conversation = Conversation([{"role": "system", "content": "be brief"}])
    asked = conversation.asking("one")
    assert [message["content"] for message in asked] == ["be brief", "one"]
    assert len(conversation.messages) == 1
    conversation.answered("one", "two")
    assert [message["role"] for message in conversation.asking("three")] == ["system", "user", "assistant", "user"]


def test_every_turn_has_the_same_key_and_every_conversation_another():
    one, other = Conversation(), Conversation()
    first = build(model="m", messages=one.asking("x"), **one.options)
    one.answered("x", "y")
    second = build(model="m", messages=one.asking("z"), **one.options)
    assert len(first.turn_key) == TURN_KEY_BYTES
    assert first.turn_key == second.turn_key != other.options["turn_key"]


@pytest.mark.parametrize("reusable", [True, False])
def test_the_key_does_not_show(reusable):
    conversation = Conversation(reusable=reusable)
    conversation.answered("a secret", "another")
    assert repr(conversation) == "<Conversation of 2 messages>"
    assert bool(conversation.options) == reusable
