"""Conversations are recognised by what was said, within bounded memory."""

import sys

from tie.device.request import build
from tie.device.turns import Turns, _essence
from tie.proto import request_pb2


def message(role: str, *texts: str, **more: object) -> request_pb2.Message:
    parts = [request_pb2.Part(text=text) for text in texts]
    return request_pb2.Message(role=role, parts=parts, **more)  # type: ignore[arg-type]


def turn(turns: Turns, *messages: request_pb2.Message, answer: str = "yes", model: str = "m") -> bytes:
    request = build(model=model, messages=messages)
    request.turn_key = turns.key(request)
    turns.answered(request, [message("assistant", answer)])
    return request.turn_key


def test_a_conversation_keeps_its_key_from_turn_to_turn() -> None:
    turns = Turns()
    said = [message("system", "s"), message("user", "one")]
    first = turn(turns, *said)
    said += [message("assistant", "yes"), message("user", "two")]
    assert turn(turns, *said, answer="no") == first
    said += [message("assistant", "no"), message("user", "three")]
    assert turn(turns, *said) == first
    assert turn(turns, *said[:4], message("assistant", "no"), message("user", "another way on")) == first
    assert turn(turns, *said[:2], message("assistant", "yes"), message("user", "back to the beginning")) == first


def test_others_have_other_keys() -> None:
    turns = Turns()
    said = (message("user", "one"), message("assistant", "yes"), message("user", "two"))
    keys = [
        turn(turns, said[0]),
        turn(turns, said[0]),
        turn(turns, message("user", "other"), *said[1:]),
        turn(turns, said[0], message("assistant", "never said"), said[2]),
        turn(turns, *said, model="other"),
        turn(Turns(), *said),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)


def test_what_clients_change_on_the_way_back_is_no_difference() -> None:
    turns = Turns()
    question = message("user", "one")
    call = request_pb2.ToolCall(id="call_1", name="f", arguments_json="{}")
    request = build(model="m", messages=[question])
    request.turn_key = turns.key(request)
    turns.answered(request, [message("assistant", " padded\n"), message("assistant", tool_calls=[call])])
    call.id = "another"
    for back in (message("assistant", "pad", "ded"), message("assistant", tool_calls=[call])):
        assert turn(turns, question, back, message("user", "two")) == request.turn_key


def test_a_conversation_is_read_once_however_many_choices_it_has(monkeypatch) -> None:
    read = []

    def essence(one: request_pb2.Message) -> bytes:
        read.append(one.parts[0].text)
        return _essence(one)

    monkeypatch.setattr("tie.device.turns._essence", essence)
    turns = Turns()
    request = build(model="m", messages=[message("user", "one"), message("assistant", "yes"), message("user", "two")])
    request.turn_key = turns.key(request)
    read.clear()
    turns.answered(request, [message("assistant", str(number)) for number in range(128)])
    assert read == ["one", "yes", "two", *map(str, range(128))]
    assert len(turns) == 128


def test_a_conversation_may_begin_with_an_answer() -> None:
    turns = Turns()
    assert turn(turns) == turn(turns, message("assistant", "yes"), message("user", "two"))


def test_memory_is_bounded_and_who_was_used_last_stays() -> None:
    turns = Turns(most=8)
    kept = turn(turns, message("user", "kept"))
    for number in range(50):
        turn(turns, message("user", str(number)))
        assert turn(turns, message("user", "kept"), message("assistant", "yes"), message("user", "?")) == kept
        assert len(turns) <= 8
    first = (message("user", "0"), message("assistant", "yes"), message("user", "?"))
    assert turn(turns, *first) != kept


def test_nothing_of_it_shows() -> None:
    turns = Turns()
    key = turn(turns, message("user", "private"))
    assert "private" not in repr(turns)
    assert key.hex() not in repr(turns)
    held = [name for names in vars(turns).values() if isinstance(names, dict) for name in names]
    assert held
    assert all(b"private" not in name and sys.getsizeof(name) < 100 for name in held)
