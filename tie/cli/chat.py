"""`tie chat`: a conversation with the model, or one answer. What is said stays in this process's memory."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import click

from tie.assets.images import MAX_IMAGE_BYTES
from tie.cli import asking, settings
from tie.cli.exits import exit_code
from tie.cli.main import complain
from tie.daemon.errors import PeerDiedError, PeerTimeoutError, TieError, UserError
from tie.device.client import Client
from tie.device.conversations import Conversation
from tie.device.errors import NodeFailedError, UnreachableError
from tie.device.request import Message, build

_NOT_TEXT = "what is asked is not text in the terminal's encoding"
_ENCODING = "convert it to UTF-8 (iconv -t utf-8), and use a UTF-8 locale"
_HELP = "/new forgets the conversation, /exit ends it; Ctrl-C stops an answer."


@click.command()
@click.argument("prompt", nargs=-1)
@click.option("--run-dir", type=click.Path(path_type=Path), default=settings.default_run_dir, help="Of a local node.")
@click.option("--url", help="Of the node's ingress [default: the local node's].")
@click.option("--statement-key", type=click.Path(path_type=Path), help="The fleet's statement.pub [default: local].")
@click.option("--model", help="Model id [default: the local node's].")
@click.option("--system", help="A system message.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.5, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=0.9, show_default=True, help="Keep the likeliest tokens up to this share.")
@click.option("--top-k", type=int, help="Keep this many tokens.")
@click.option("--max-tokens", type=int, help="Longest answer.")
@click.option("--seed", type=int, help="The same seed and request give the same answer.")
@click.option("--stop", multiple=True, help="Ends the answer; may be repeated.")
@click.option(
    "--image", "images", multiple=True, type=click.Path(path_type=Path), help="A JPEG or PNG file; may be repeated."
)
@click.option("--stats", is_flag=True, help="Time to the first token and tokens per second, on standard error.")
@click.option("--json", "as_json", is_flag=True, help="One answer as a JSON object.")
def chat(
    *,
    prompt: tuple[str, ...],
    run_dir: Path,
    url: str | None,
    statement_key: Path | None,
    model: str | None,
    system: str | None,
    images: tuple[Path, ...],
    stats: bool,
    as_json: bool,
    **sampling: Any,
) -> int:
    """Talk to the model: a conversation, or one answer to PROMPT or to standard input.

    Images go with what is said first.

    Exit codes: 65 the request is refused or empty, 69 no node answers, 70 the node failed, 75 busy (try again), 76 the
    node or its answer cannot be trusted, 78 no node runs here. `tie --help` lists all.
    """
    options = {name: value for name, value in sampling.items() if value not in (None, ())}
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    try:
        target = asking.target(run_dir, url, statement_key, model)
        with Client(target.url, target.statement_key) as client:
            once = bool(prompt) or as_json or not sys.stdin.isatty()
            conversation = _Conversation(client, target.model, options, history, stats=stats, reusable=not once)
            conversation.images = [_read_image(path) for path in images]
            if once:
                text = " ".join(prompt) if prompt else _read_all()
                return _once(conversation, text, as_json=as_json)
            click.secho(f"{target.model}: {_HELP}", dim=True)
            conversation.loop()
    except TieError as error:
        _complain(error)
        return exit_code(error)
    return 0


def _once(conversation: "_Conversation", text: str, *, as_json: bool) -> int:
    if not text:
        raise UserError("nothing to ask", hint='give a prompt: tie chat "Hello"')
    try:
        answer = conversation.say(text, show=not as_json)
    except KeyboardInterrupt:
        click.echo()
        return 130
    if as_json:
        figures = {"tokens_per_s": round(answer.tokens_per_s, 2)}
        click.echo(json.dumps({**dataclasses.asdict(answer), **figures}, ensure_ascii=False))
    return 0


class _Conversation:
    """What is said on the terminal; with a turn key where there can be several turns."""

    def __init__(
        self,
        client: Client,
        model: str,
        options: dict[str, Any],
        history: list[Message],
        *,
        stats: bool,
        reusable: bool,
    ) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._beginning = history
        self._reusable = reusable
        self._said = Conversation(history, reusable=reusable)
        self._stats = stats
        self.images: list[bytes] = []  # go with the next that is said

    def say(self, text: str, *, show: bool = True) -> asking.Answer:
        """One turn. When it fails or is interrupted it is as if nothing had been said."""
        printer = _print_piece if show else lambda _: None
        options = {**self._options, **self._said.options}
        messages = self._said.asking(text, self.images)
        _check(messages, self._model, options)
        answer = asking.ask(self._client, messages, printer, model=self._model, **options)
        if show:
            click.echo()
        if self._stats:
            click.secho(str(answer), dim=True, err=True)
        self._said.answered(text, answer.text, self.images)
        self.images = []
        return answer

    def loop(self) -> None:
        """Reads lines until the end."""
        importlib.import_module("readline")  # gives input() editing and history, in memory only
        while True:
            try:
                line = input("» ").strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo("\n" + _HELP)
                continue
            except UnicodeDecodeError:
                complain(UserError(_NOT_TEXT, hint=_ENCODING))
                continue
            match line:
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/new":
                    self._said = Conversation(self._beginning, reusable=self._reusable)
                    continue
                case _ if line.startswith("/"):
                    click.echo(_HELP)
                    continue
            try:
                self.say(line)
            except KeyboardInterrupt:
                click.secho("\n[stopped]", dim=True)
            except TieError as error:
                click.echo()
                _complain(error)


def _complain(error: TieError) -> None:
    complain(error)
    if way_out := _way_out(error):
        click.echo(f"     {way_out}", err=True)


def _way_out(error: TieError) -> str:
    """What to do about an error that has no hint of its own; empty where it has one, or nothing can be done."""
    match error:
        case UnreachableError(sent=True):
            return "the node went away while the request was on its way: ask again once it is back (tie status)"
        case UnreachableError():
            return "`tie up` starts a node on this machine; --url names another one"
        case PeerTimeoutError():
            return "ask again when the node has less to do, or for less (--max-tokens)"
        case NodeFailedError() | PeerDiedError():
            return "ask again: the node mends itself in seconds (tie status), and what happened is in `tie events`"
    return ""


def _read_image(path: Path) -> bytes:
    """A file as it is: what is in it is the node's to see."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not data or len(data) > MAX_IMAGE_BYTES:
        raise UserError(f"{path} is empty, or has more than {MAX_IMAGE_BYTES} bytes", hint="send a smaller picture")
    return data


def _read_all() -> str:
    try:
        return sys.stdin.read().strip()
    except UnicodeDecodeError:
        raise UserError(_NOT_TEXT, hint=_ENCODING) from None


def _check(messages: list[Message], model: str, options: dict[str, Any]) -> None:
    """What a request cannot even hold; what its values mean is the node's to judge.

    Raises:
        UserError: text that is none, or a number that does not fit.
    """
    try:
        build(model=model, messages=messages, **options)
    except UnicodeEncodeError:
        raise UserError(_NOT_TEXT, hint=_ENCODING) from None
    except ValueError as error:
        raise UserError(f"a number does not fit into a request: {error}", hint="tie chat --help lists them") from None


def _print_piece(text: str) -> None:
    """Shows a piece of an answer, without anything that a terminal would act on."""
    click.echo("".join(each if each.isprintable() or each in "\n\t" else "?" for each in text), nl=False)
    sys.stdout.flush()
