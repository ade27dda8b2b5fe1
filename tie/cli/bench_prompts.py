"""What a benchmark asks: prompts from a file, or random words that no cache of any kind can know."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tie.daemon.errors import ConfigError

# Short and common, so that most vocabularies hold each with its space as one token.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name president team minute idea kid body back parent face level"
)


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        messages: `{"role": …, "content": …}` each.
        max_tokens: longest answer; None for the benchmark's own.
    """

    messages: tuple[dict[str, str], ...]
    max_tokens: int | None = None


def random_prompts(words: int, seed: int) -> Iterator[Prompt]:
    """An endless stream of different prompts of `words` words, the same for the same seed."""
    source = random.Random(seed)  # noqa: S311 (no secret: prompts that can be had again)
    vocabulary = _WORDS.split()
    while True:
        yield Prompt(({"role": "user", "content": " ".join(source.choices(vocabulary, k=words))},))


def file_prompts(path: Path, seed: int) -> Iterator[Prompt]:
    """The prompts of a JSONL file, over and over, in an order that the seed decides.

    Each line is `{"prompt": text}` or `{"messages": […]}`, either with an optional "max_tokens".

    Raises:
        ConfigError: the file cannot be read, or a line is none of these.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts in {path}") from error
    prompts = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompts", hint="one JSON object a line, for example " + _EXAMPLE)
    return _shuffled(prompts, seed)


_EXAMPLE = '{"prompt": "Why is the sky blue?"}'


def _shuffled(prompts: list[Prompt], seed: int) -> Iterator[Prompt]:
    source = random.Random(seed)  # noqa: S311 (see random_prompts)
    while True:
        yield from source.sample(prompts, len(prompts))


def _parse(path: Path, number: int, line: str) -> Prompt:
    wrong = ConfigError(f"{path}:{number} is no prompt", hint="for example " + _EXAMPLE)
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError:
        raise wrong from None
    if not isinstance(entry, dict):
        raise wrong
    messages = entry.get("messages", [{"role": "user", "content": entry.get("prompt")}])
    max_tokens = entry.get("max_tokens")
    whole = isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(value, str) for value in message.values())
        for message in messages
    )
    if not whole or not messages or not (max_tokens is None or (isinstance(max_tokens, int) and max_tokens > 0)):
        raise wrong
    return Prompt(tuple(messages), max_tokens)
