"""What the proxy reads of others: the bodies of requests, and the text of a model that calls tools."""

import json

from tie.device.proxy import chat, completions, translate
from tie.device.proxy.failures import ApiError
from tie.device.proxy.requests import ChatRequest, CompletionRequest, decode
from tie.device.proxy.tool_calls import Arguments, Begun, CallReader, Text

NAMES = frozenset({"f", "weather"})
FORMS = ((ChatRequest, translate.chat, chat.answer), (CompletionRequest, translate.completion, completions.answer))


def proxy(data: bytes) -> None:
    """Byte 0: bit 0 says what the rest is: the body of a request, or what a model writes.

    Of a body bit 1 says which kind it is. Of a model's text bit 1 says whether one call is wanted, the other bits how
    many characters come at once.
    """
    if not data:
        return
    flags, rest = data[0], data[1:]
    if flags & 1:
        _written(rest.decode(errors="replace"), size=1 + (flags >> 2), single=bool(flags & 2))
    else:
        _asked(rest, flags >> 1 & 1)


def _asked(body: bytes, form: int) -> None:
    kind, make, answer = FORMS[form]
    refusal = None
    try:
        asked = decode(body, kind)
        request = make(asked)
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status in {400, 422}
        assert json.loads(refusal.body)["error"]["message"]
        return
    assert request.FromString(request.SerializeToString()) == request
    assert request.model == asked.model
    assert len(request.messages) == len(asked.messages) if form == 0 else request.prompt
    assert len(answer(asked).begin()) == (asked.count if form == 0 else 0)


def _written(text: str, *, size: int, single: bool) -> None:
    whole = _read([text], single=single)
    assert _read([text[at : at + size] for at in range(0, len(text), size)], single=single) == whole
    said, calls = whole
    assert len(said) + sum(len(arguments) for _, arguments in calls) <= len(text)
    assert not single or len(calls) <= 1
    assert all(arguments.startswith("{") for _, arguments in calls if arguments)


def _read(pieces: list[str], *, single: bool) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls."""
    reader, said, calls = CallReader(NAMES, single=single), "", []
    for event in [event for piece in pieces for event in reader.feed(piece)] + reader.finish():
        match event:
            case Text(more):
                assert more
                said += more
            case Begun(number, name):
                assert number == len(calls)
                assert name in NAMES
                calls.append([name, ""])
            case Arguments(number, more):
                assert number == len(calls) - 1
                calls[number][1] += more
    return said, [(name, arguments) for name, arguments in calls]
