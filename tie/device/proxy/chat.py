"""An answer as `/v1/chat/completions` gives it: whole, or in chunks while it comes."""

import secrets
from typing import Any

from tie.device.answer import Delta
from tie.device.proxy.answers import Answer, Choice, Json, Label, scored
from tie.device.proxy.requests import ChatRequest
from tie.device.proxy.tool_calls import Arguments, Begun, CallReader, Event, Text
from tie.proto import request_pb2


def answer(asked: ChatRequest) -> Answer:
    """The answer to a request, of which nothing has come yet."""
    label = Label.new("chatcmpl", "chat.completion", "chat.completion.chunk", asked.model)
    return Answer(label, [_Choice(asked) for _ in range(asked.count)], asked)


class _Choice(Choice):
    def __init__(self, asked: ChatRequest) -> None:
        offered = asked.tools if asked.tools and asked.tool_choice != "none" else []
        names = {tool.function.name for tool in offered}
        self._calls: list[Json] = []
        self._logprobs: list[Json] | None = [] if asked.logprobs else None
        self._reader = CallReader(names, single=asked.parallel_tool_calls is False) if names else None
        self._texts: list[str] = []

    def begin(self) -> list[Json]:
        return [_part({"role": "assistant", "content": ""})]

    def take(self, piece: Delta) -> list[Json]:
        deltas = self._all(self._reader.feed(piece.text) if self._reader else [Text(piece.text)] if piece.text else [])
        tokens = [scored(token) for token in piece.logprobs]
        if self._logprobs is None or not tokens:
            return [_part(delta) for delta in deltas]
        self._logprobs += tokens
        first, *others = deltas or [{}]
        return [_part(first, tokens), *(_part(delta) for delta in others)]

    def end(self) -> list[Json]:
        deltas = self._all(self._reader.finish() if self._reader else [])
        return [_part(delta) for delta in [*deltas, {}]]

    def whole(self) -> Json:
        message: Json = {"role": "assistant", "content": self._content, "refusal": None}
        if self._calls:
            message["tool_calls"] = self._calls
        return {"message": message, "logprobs": _logprobs(self._logprobs)}

    def reason(self, finish: str) -> str:
        why = super().reason(finish)
        return "tool_calls" if self._calls and why == "stop" else why

    def message(self) -> request_pb2.Message:
        return request_pb2.Message(
            role="assistant",
            parts=[request_pb2.Part(text=self._content)] if self._content else [],
            tool_calls=[
                request_pb2.ToolCall(
                    id=call["id"], name=call["function"]["name"], arguments_json=call["function"]["arguments"]
                )
                for call in self._calls
            ],
        )

    @property
    def _content(self) -> str | None:
        """The text; None where there are only calls."""
        text = "".join(self._texts)
        return None if self._calls and not text else text

    def _all(self, events: list[Event]) -> list[Json]:
        return [self._delta(event) for event in events]

    def _delta(self, event: Event) -> Json:
        match event:
            case Text(text):
                self._texts.append(text)
                return {"content": text}
            case Begun(number, name):
                call: dict[str, Any] = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
                self._calls.append({**call, "function": {"name": name, "arguments": ""}})
                return {"tool_calls": [{"index": number, **call, "function": {"name": name, "arguments": ""}}]}
            case Arguments(number, text):
                self._calls[number]["function"]["arguments"] += text
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


def _part(delta: Json, tokens: list[Json] | None = None) -> Json:
    return {"delta": delta, "logprobs": _logprobs(tokens)}


def _logprobs(tokens: list[Json] | None) -> Json | None:
    return None if tokens is None else {"content": tokens, "refusal": None}
