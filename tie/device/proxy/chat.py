"""An answer as `/v1/chat/completions` gives it: whole, or in chunks while it comes."""

import secrets
from typing import Any

from tie.device.answer import Delta, Result
from tie.device.proxy.answers import Json, Label, reason, scored, usage
from tie.device.proxy.requests import ChatRequest
from tie.device.proxy.tool_calls import Arguments, Begun, CallReader, Event, Text
from tie.proto import request_pb2


class _Choice:
    """One of the `n` answers as it grows."""

    def __init__(self, asked: ChatRequest) -> None:
        offered = asked.tools if asked.tools and asked.tool_choice != "none" else []
        names = {tool.function.name for tool in offered}
        self.calls: list[Json] = []
        self.logprobs: list[Json] | None = [] if asked.logprobs else None
        self._reader = CallReader(names, single=asked.parallel_tool_calls is False) if names else None
        self._texts: list[str] = []

    @property
    def content(self) -> str | None:
        """The text; None where there are only calls."""
        text = "".join(self._texts)
        return None if self.calls and not text else text

    @property
    def message(self) -> Json:
        """The whole message."""
        message: Json = {"role": "assistant", "content": self.content, "refusal": None}
        return {**message, "tool_calls": self.calls} if self.calls else message

    def take(self, text: str) -> list[Json]:
        """The chunks' deltas that the next text makes."""
        return self._all(self._reader.feed(text) if self._reader else [Text(text)] if text else [])

    def finish(self) -> list[Json]:
        """The deltas that the end makes."""
        return self._all(self._reader.finish() if self._reader else [])

    def _all(self, events: list[Event]) -> list[Json]:
        return [self._delta(event) for event in events]

    def _delta(self, event: Event) -> Json:
        match event:
            case Text(text):
                self._texts.append(text)
                return {"content": text}
            case Begun(number, name):
                call: dict[str, Any] = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
                self.calls.append({**call, "function": {"name": name, "arguments": ""}})
                return {"tool_calls": [{"index": number, **call, "function": {"name": name, "arguments": ""}}]}
            case Arguments(number, text):
                self.calls[number]["function"]["arguments"] += text
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


class ChatAnswer:
    """One answer. Feed it all that comes; it gives chunks, and at the end the whole."""

    def __init__(self, asked: ChatRequest) -> None:
        self._label = Label.new("chatcmpl", "chat.completion", asked.model)
        self._choices = [_Choice(asked) for _ in range(max(1, asked.n or 1))]
        self._usage: Json = {"usage": None} if asked.stream_options and asked.stream_options.include_usage else {}

    def begin(self) -> list[Json]:
        """The chunks before any text."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta) for index in range(len(self._choices))]

    def take(self, piece: Delta) -> list[Json]:
        """The chunks of a piece."""
        choice = self._choices[piece.index]
        deltas = choice.take(piece.text)
        tokens = [scored(token) for token in piece.logprobs]
        if choice.logprobs is None or not tokens:
            return [self._chunk(piece.index, delta) for delta in deltas]
        choice.logprobs += tokens
        first, *others = deltas or [{}]
        logprobs = {"content": tokens, "refusal": None}
        return [self._chunk(piece.index, first, logprobs), *(self._chunk(piece.index, delta) for delta in others)]

    def end(self, result: Result) -> list[Json]:
        """The last chunks."""
        chunks = []
        for index, choice in enumerate(self._choices):
            chunks += [self._chunk(index, delta) for delta in choice.finish()]
            chunks.append(self._chunk(index, {}, finish=_reason(result, index, choice)))
        if self._usage:
            chunks.append(self._label.around([], chunk=True, usage=usage(result)))
        return chunks

    def whole(self, result: Result) -> Json:
        """The answer in one, after `end`."""
        choices = [
            {
                "index": index,
                "message": choice.message,
                "logprobs": None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None},
                "finish_reason": _reason(result, index, choice),
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._label.around(choices, usage=usage(result))

    def messages(self) -> list[request_pb2.Message]:
        """The answers as they will be sent back in the conversation's next request."""
        return [
            request_pb2.Message(
                role="assistant",
                parts=[request_pb2.Part(text=choice.content)] if choice.content else [],
                tool_calls=[
                    request_pb2.ToolCall(
                        id=call["id"], name=call["function"]["name"], arguments_json=call["function"]["arguments"]
                    )
                    for call in choice.calls
                ],
            )
            for choice in self._choices
        ]

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._label.around([choice], chunk=True, **self._usage)


def _reason(result: Result, index: int, choice: _Choice) -> str:
    why = reason(result.finish[index] if index < len(result.finish) else "")
    return "tool_calls" if choice.calls and why == "stop" else why
