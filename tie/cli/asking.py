"""One question to a node, its answer printed as it comes, with the two figures that people look at."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from tie.assets.bundle import open_bundle
from tie.cli import settings
from tie.device.client import Client
from tie.device.request import Message, Options


@dataclass(frozen=True)
class Target:
    """Whom to ask.

    Attributes:
        url: of the ingress.
        statement_key: what the node's key statement is verified with.
        model: model id.
    """

    url: str
    statement_key: Path
    model: str


def target(run_dir: Path, url: str | None, statement_key: Path | None, model: str | None) -> Target:
    """Whom to ask: what is named, and for the rest the node that runs on this machine.

    Raises:
        ConfigError: something is not named and no node runs here to look it up.
    """
    if url and statement_key and model:
        return Target(url, statement_key, model)
    config = settings.load_running(run_dir)
    return Target(
        url=url or f"http://{config.cloudboard.host}:{config.cloudboard.port}",
        statement_key=statement_key or config.sockets.statement_key.with_suffix(".pub"),
        model=model or open_bundle(Path(config.model.bundle)).manifest.model,
    )


def local_model(run_dir: Path) -> str:
    """The id of the model that the node in `run_dir` serves.

    Raises:
        ConfigError: no node runs there.
        BundleError: it has no bundle that can be read.
    """
    return open_bundle(Path(settings.load_running(run_dir).model.bundle)).manifest.model


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        text: of the answer.
        finish: why it ended.
        prompt_tokens: of the rendered prompt.
        completion_tokens: of the answer.
        cached_tokens: of the prompt, reused from an earlier turn.
        first_s: seconds until its first text.
        total_s: seconds until its end.
        pieces: in which its text came.
    """

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    first_s: float
    total_s: float
    pieces: int

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token; 0 where there is nothing to measure, as in an answer that came in one piece."""
        seconds = self.total_s - self.first_s
        return (self.completion_tokens - 1) / seconds if self.pieces > 1 and seconds > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"first token after {self.first_s:.2f} s · {self.completion_tokens} tokens"
            + (f" · {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else "")
            + (f" · {self.cached_tokens} of {self.prompt_tokens} prompt tokens reused" if self.cached_tokens else "")
        )


def ask(
    client: Client,
    messages: Sequence[Message],
    show: Callable[[str], None],
    *,
    model: str,
    **options: Unpack[Options],
) -> Answer:
    """Asks and shows every piece as it comes. An interrupt stops the node's work and goes on to the caller.

    Raises:
        TieError: as tie.device.errors lists.
    """
    begun = time.monotonic()
    first: float | None = None
    pieces = 0
    with client.chat(messages, model=model, **options) as answer:
        for delta in answer:
            if delta.text:
                pieces += 1
                first = first or time.monotonic()
            show(delta.text)
        result = answer.result()
    ended = time.monotonic()
    return Answer(
        text=result.text,
        finish=result.finish[0],
        prompt_tokens=result.prompt_tokens,
        completion_tokens=result.completion_tokens,
        cached_tokens=result.cached_tokens,
        first_s=(first or ended) - begun,
        total_s=ended - begun,
        pieces=pieces,
    )
