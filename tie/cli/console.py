"""What `tie up` prints: its own messages on standard output, the daemons' log lines on standard error."""

import json
import sys
import time
from typing import Any

import click

_COLOURS = ("cyan", "green", "yellow", "blue", "magenta", "bright_cyan", "bright_green", "bright_blue")
_NAME_WIDTH = 16


class Console:
    """Prints for a person, or JSON lines for a program."""

    def __init__(self, *, quiet: bool, json_logs: bool) -> None:
        """Says how to print.

        Args:
            quiet: no log lines of the daemons.
            json_logs: log lines stay JSON, with the daemon's name added as "unit".
        """
        self._quiet = quiet
        self._json = json_logs
        self._colours: dict[str, str] = {}
        self._gone = False

    def say(self, text: str, *, error: bool = False) -> None:
        """A message of `tie up` itself."""
        self._print(click.style(text, fg="red" if error else None, bold=not error), error=error)

    def log(self, name: str, line: str) -> None:
        """A line that the daemon `name` wrote."""
        if self._quiet or not line:
            return
        record = parse(line) or {"message": line}
        if self._json:
            self._print(json.dumps({"unit": name, **record}), error=True)
            return
        family = name.partition("@")[0]
        colour = self._colours.setdefault(family, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._print(f"{click.style(f'{name:<{_NAME_WIDTH}}', fg=colour)} {readable(record)}", error=True)

    def _print(self, text: str, *, error: bool) -> None:
        if self._gone:
            return
        try:
            click.echo(text, err=error)
            (sys.stderr if error else sys.stdout).flush()
        except OSError:
            self._gone = True  # the terminal or the reader has left; the node goes on without


def parse(line: str) -> dict[str, Any] | None:
    """A structured log line (tie.daemon.log, or what `--json-logs` makes of others), or None when it is none."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and ("event" in record or "message" in record) else None


def readable(record: dict[str, Any]) -> str:
    """A structured log line as one line for a person; a plain message as itself."""
    unit = f"{record['unit']:<{_NAME_WIDTH}} " if "unit" in record else ""
    if "event" not in record:
        return printable(f"{unit}{record['message']}")
    stamp = record.get("t")
    clock = time.strftime("%H:%M:%S", time.localtime(stamp)) if isinstance(stamp, int | float) else "        "
    fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in ("t", "event", "pid", "unit"))
    return printable(f"{unit}{clock} {record['event']} {fields}".rstrip())


def printable(text: str) -> str:
    """Without anything that a terminal would act on."""
    return "".join(character if character.isprintable() else "?" for character in text)
