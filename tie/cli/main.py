"""The `tie` command: one group, its commands imported when they are called, so that `tie --help` is quick."""

import contextlib
import importlib
import io
import os
import signal
import sys
from typing import Any, NoReturn

import click

from tie import __version__
from tie.cli.exits import MEANINGS, exit_code
from tie.daemon.errors import ConfigError, TieError, UserError

# Command → where it is, and what `tie --help` says of it (so that the module need not be imported for that).
_COMMANDS = {
    "up": ("tie.cli.up:up", "Run a whole node in this terminal."),
    "chat": ("tie.cli.chat:chat", "Talk to the model."),
    "status": ("tie.cli.operate:status", "Show the node's state and its parts."),
    "events": ("tie.cli.events:events", "Say what happened to the node, and why."),
    "gpu": ("tie.cli.gpu:gpu", "Show each GPU: verdict, reasons, telemetry."),
    "recycle": ("tie.cli.operate:recycle", "Replace the runtime by a fresh one."),
    "maintenance": ("tie.cli.operate:maintenance", "Take the node out of service, or back in."),
    "metrics": ("tie.cli.operate:metrics", "Print the metrics of the node's daemons."),
    "proxy": ("tie.cli.proxy:proxy", "Serve OpenAI's API on this machine."),
    "bench": ("tie.cli.bench:bench", "Measure how fast a node answers."),
    "install": ("tie.cli.install.command:install", "Put a node on this machine, run by systemd."),
    "uninstall": ("tie.cli.install.command:uninstall", "Take it away again."),
    "doctor": ("tie.cli.doctor:doctor", "Say what this machine lacks and how to get it."),
    "assets": ("tie.cli.assets:assets", "Make, check and activate model bundles."),
    "demo": ("tie.cli.demo:demo", "Start a node, ask, recycle, ask again, stop."),
}


class _LazyGroup(click.Group):
    """Imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in ("tie", "controllerd", "kvxfer"):
                raise
            raise ConfigError(
                f"`tie {cmd_name}` needs the Python package {error.name!r}, which is not installed",
                hint="it runs where the node's packages are: ./run setup, or the extra `node`",
            ) from error
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in MEANINGS.items()])


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tie")
def tie() -> None:
    """TIE, The Inference Engine: a node that serves language models and keeps nothing of what it served."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line and exits; an expected error is a message and a hint, never a traceback."""
    _end_at_once_when_interrupted()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows that
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output left (`tie status | head`): not our error, and nothing more can be said.
        code = 141
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Commands have cleaned up behind them, and gRPC's threads sometimes crash in an interpreter that takes itself down.
    os._exit(code)


def _run(arguments: list[str] | None) -> int:
    try:
        result: Any = tie.main(args=arguments, standalone_mode=False)
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except TieError as error:
        complain(error)
        return exit_code(error)
    return result if isinstance(result, int) else 0


def _end_at_once_when_interrupted() -> None:
    """Until a command has been imported, Ctrl-C has nothing to clean up: it ends the process without a word.

    `./run` blocks the signal until here, so that it does not end in a traceback out of the interpreter's own start.
    """
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # else it is ignored, as of a job in the background
        signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end(*_: object) -> None:
    os._exit(130)


def complain(error: TieError) -> None:
    """Prints an expected error: what is wrong, and what to do about it."""
    click.secho(f"tie: {error}", fg="red", err=True)
    hint = error.hint if isinstance(error, UserError) else ""
    if hint:
        click.echo(f"     {hint}", err=True)


if __name__ == "__main__":
    main()
