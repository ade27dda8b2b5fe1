"""What the soak asks for, and what each answer must look like. Everything is drawn from one seeded source."""

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from tie.daemon.errors import TieError
from tie.device.answer import Result
from tie.device.async_client import AsyncClient
from tie.device.errors import NodeBusyError, RequestRefusedError

ANSWER_S = 300.0  # a long answer in a full batch, on a machine with two cores
WORDS = ("river", "stone", "light", "seven", "garden", "window", "paper", "north", "winter", "copper", "forest")
ODD = ("🜁🜂 ", "naïve façade ", "<|im_end|> ", "\u202eright to left ", "汉字かな ", "\n\n\n", "a" * 200 + " ", "\x00 ")
STOPS = (" the", "e", "\n", ". ", "and then", "é")
SCHEMAS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 6},
    {
        "type": "object",
        "properties": {"at": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
        "required": ["at"],
    },
    {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": "maybe"}]},
)
REGEXES = (r"[0-9]{3}-[0-9]{4}", r"(yes|no|perhaps), (because|although) [a-z ]{5,30}\.")
LARK = 'start: "move " ("north" | "south") " " NUMBER\nNUMBER: /[1-9][0-9]?/\n'


class WrongAnswerError(Exception):
    """An answer that is not what its request promises."""


@dataclass
class Outcomes:
    """What became of the requests.

    Attributes:
        counts: by kind and outcome.
        unexpected: what should not have happened, in words; the first hundred.
    """

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)

    def count(self, kind: str, outcome: str) -> None:
        of_kind = self.counts.setdefault(kind, {})
        of_kind[outcome] = of_kind.get(outcome, 0) + 1

    def wrong(self, kind: str, what: str) -> None:
        self.count(kind, "UNEXPECTED")
        if len(self.unexpected) < 100:
            self.unexpected.append(f"{kind}: {what}")


class Soak:
    """One stream of random requests.

    Args:
        client: a device of the node.
        model: the node's.
        outcomes: takes what happens.
        source: of all choices.
    """

    def __init__(self, client: AsyncClient, model: str, outcomes: Outcomes, source: random.Random) -> None:
        self._client = client
        self._model = model
        self._outcomes = outcomes
        self._source = source
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[str]]]] = {
            "plain": (8, self._plain),
            "choices": (2, self._choices),
            "stop": (3, self._stop),
            "schema": (3, self._schema),
            "regex": (2, self._regex),
            "logprobs": (1, self._logprobs),
            "abandoned": (4, self._abandoned),
            "refused": (3, self._refused),
            "flood": (1, self._flood),
        }

    async def run(self, stopping: asyncio.Event) -> None:
        """Asks one thing after another until `stopping` is set."""
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        while not stopping.is_set():
            kind = self._source.choices(names, weights)[0]
            try:
                async with asyncio.timeout(ANSWER_S):
                    self._outcomes.count(kind, await self._kinds[kind][1]())
            except NodeBusyError:
                self._outcomes.count(kind, "busy")
                await asyncio.sleep(0.2)
            except WrongAnswerError as error:
                self._outcomes.wrong(kind, str(error))
            except RequestRefusedError as error:
                self._outcomes.wrong(kind, f"{error} ({error.status}: {error.detail[:200]})")
            except TieError as error:
                status = getattr(error, "status", "") or getattr(error, "code", "")
                self._outcomes.wrong(kind, f"{type(error).__name__} {status}: {error}")
            except TimeoutError:
                self._outcomes.wrong(kind, f"no end within {ANSWER_S:.0f} s")

    def _text(self, most: int) -> str:
        words = int(2 ** self._source.uniform(0, most.bit_length() - 1))
        text = " ".join(self._source.choices(WORDS, k=words))
        return self._source.choice(ODD) + text if self._source.random() < 0.2 else text

    def _sampling(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "temperature": self._source.choice((0.0, 0.7, 1.0, 1.5)),
            "seed": self._number(2**63),
        }
        if self._source.random() < 0.3:
            options["top_k"] = self._number(100)
        if self._source.random() < 0.3:
            options["top_p"] = self._source.uniform(0.1, 1.0)
        if self._source.random() < 0.2:
            options["repetition_penalty"] = self._source.uniform(0.8, 1.5)
        if self._source.random() < 0.2:
            options["presence_penalty"] = self._source.uniform(-1, 1)
        if self._source.random() < 0.3:
            options["batch"] = True
        return options

    def _number(self, below: int) -> int:
        return self._source.randrange(below)

    def _question(self, most: int = 256) -> list[dict[str, str]]:
        messages = [{"role": "user", "content": self._text(most)}]
        if self._source.random() < 0.3:
            messages.insert(0, {"role": "system", "content": self._text(32)})
        return messages

    async def _ask(self, *, messages: list[dict[str, str]] | None = None, **options: Any) -> Result:
        """Asks, reads it all, and checks what holds for every answer."""
        options = self._sampling() | {"max_tokens": 1 + self._number(96)} | options
        answer = await self._client.chat(messages or self._question(), model=self._model, **options)
        texts: dict[int, str] = {}
        async with answer:
            async for delta in answer:
                texts[delta.index] = texts.get(delta.index, "") + delta.text
            result = await answer.result()
        choices, most = options.get("n", 1), options["max_tokens"]
        require(len(result.texts) == len(result.finish) == choices, f"{len(result.texts)} texts of {choices}")
        require(all(result.texts[index] == text for index, text in texts.items()), "deltas are not the text")
        require(set(result.finish) <= {"stop", "length"}, f"finish {result.finish}")
        require(result.prompt_tokens > 0, "no prompt tokens")
        require(choices <= result.completion_tokens <= choices * most, f"{result.completion_tokens} tokens of {most}")
        if set(result.finish) == {"length"} and not _constrained(options):
            require(result.completion_tokens == choices * most, "short for its length")
        return result

    async def _plain(self) -> str:
        if self._source.random() < 0.05:
            await self._ask(messages=self._question(2048), max_tokens=4)
            return "ok"
        long = self._source.random() < 0.1
        result = await self._ask(max_tokens=256 if long else 1 + self._number(96), ignore_eos=long)
        require(not long or result.finish == ("length",), "an end that was to be ignored")
        return "ok"

    async def _choices(self) -> str:
        await self._ask(n=2 + self._number(3), max_tokens=1 + self._number(32))
        return "ok"

    async def _stop(self) -> str:
        stops = self._source.sample(STOPS, 1 + self._number(3))
        result = await self._ask(stop=stops, ignore_eos=True)
        require(not any(stop in result.text for stop in stops), "a stop string in the answer")
        return "ok"

    async def _schema(self) -> str:
        schema = self._source.choice(SCHEMAS)
        result = await self._ask(json_schema=json.dumps(schema), max_tokens=128)
        if result.finish != ("stop",):
            return "cut"
        try:
            jsonschema.validate(json.loads(result.text), schema)
        except (json.JSONDecodeError, jsonschema.ValidationError):
            raise WrongAnswerError("an answer that its schema forbids") from None
        return "ok"

    async def _regex(self) -> str:
        if self._source.random() < 0.5:
            result, pattern = await self._ask(lark=LARK), r"move (north|south) [1-9][0-9]?"
        else:
            pattern = self._source.choice(REGEXES)
            result = await self._ask(regex=pattern)
        if result.finish != ("stop",):
            return "cut"
        require(re.fullmatch(pattern, result.text) is not None, "an answer that its grammar forbids")
        return "ok"

    async def _logprobs(self) -> str:
        top = self._number(6)
        answer = await self._client.chat(self._question(), model=self._model, logprobs=top, max_tokens=16)
        async with answer:
            scored = [entry for delta in [delta async for delta in answer] for entry in delta.logprobs]
            result = await answer.result()
        require(0 < len(scored) <= result.completion_tokens, f"{len(scored)} scores of {result.completion_tokens}")
        require(all(entry.logprob <= 0 and len(entry.top) == top for entry in scored), "impossible scores")
        return "ok"

    async def _abandoned(self) -> str:
        """The client goes away: before the first text, or in the middle of it."""
        answer = await self._client.chat(self._question(), model=self._model, max_tokens=512, ignore_eos=True)
        async with answer:
            if self._source.random() < 0.3:
                await asyncio.sleep(self._source.uniform(0, 0.5))
                return "before text"
            wanted = 1 + self._number(12)
            async for _ in answer:
                wanted -= 1
                if not wanted:
                    return "in the middle"
        return "ended first"

    async def _refused(self) -> str:
        bad: dict[str, tuple[dict[str, Any], str]] = {
            "model": ({"model": "no-such-model"}, "STATUS_UNKNOWN_MODEL"),
            "tokens": ({"max_tokens": -1}, "STATUS_INVALID_REQUEST"),
            "choices": ({"n": 1000}, "STATUS_INVALID_REQUEST"),
            "temperature": ({"temperature": float("nan")}, "STATUS_INVALID_REQUEST"),
            "role": ({"messages": [{"role": "nobody", "content": "x"}]}, "STATUS_INVALID_REQUEST"),
            "length": ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "STATUS_PROMPT_TOO_LONG"),
            "schema": ({"json_schema": '{"type": "no such type"}'}, "STATUS_GRAMMAR_REFUSED"),
            "json": ({"json_schema": "{"}, "STATUS_INVALID_REQUEST"),
            "regex": ({"regex": "(("}, "STATUS_GRAMMAR_REFUSED"),
            "lark": ({"lark": "start: nowhere"}, "STATUS_GRAMMAR_REFUSED"),
        }
        name = self._source.choice(list(bad))
        options, status = bad[name]
        try:
            answer = await self._client.chat(**{"messages": self._question(), "model": self._model} | options)
            await answer.result()
        except RequestRefusedError as error:
            require(error.status == status, f"{name}: {error.status} and not {status}")
            return name
        raise WrongAnswerError(f"{name}: was answered")

    async def _flood(self) -> str:
        """Many at once, in the background's priority: each is answered or told "busy"."""
        asked = [self._ask(messages=self._question(16), max_tokens=4, batch=True) for _ in range(8 + self._number(16))]
        results = await asyncio.gather(*asked, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, NodeBusyError):
                raise error
        return "some busy" if errors else "ok"


def require(condition: bool, what: str) -> None:
    """Raises WrongAnswerError where it does not hold."""
    if not condition:
        raise WrongAnswerError(what)


def _constrained(options: Mapping[str, Any]) -> bool:
    return bool(options.keys() & {"json_schema", "regex", "lark", "json_object"})
