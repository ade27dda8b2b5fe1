"""The documents say what the code does."""

import re
import shlex
import subprocess
from pathlib import Path

import click
import msgspec
import pytest

from tie.daemon.config import NodeConfig

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([a-z_]+)` \| `([^`]*)` \| (.+) \|$")


def _documented() -> dict[str, tuple[str, str]]:
    """Key → default and meaning, from docs/configuration.md."""
    found = {}
    table = ""
    for line in (ROOT / "docs/configuration.md").read_text().splitlines():
        if heading := re.match(r"^## (?:\[(\w+)\])?", line):
            table = f"{heading[1]}." if heading[1] else ""
        if row := ROW.match(line):
            found[table + row[1]] = (row[2], row[3])
    return found


def _configured() -> dict[str, str]:
    """Key → default as TOML, from the code."""
    found = {}
    for name, value in msgspec.to_builtins(NodeConfig()).items():
        keys = {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: msgspec.json.encode(inner).decode() for key, inner in keys.items()}
    return found


def test_configuration_lists_every_key_with_its_default():
    documented = _documented()
    assert {key: default for key, (default, _) in documented.items()} == _configured()
    assert all(len(meaning) > 10 for _, meaning in documented.values())


def test_every_document_is_reachable_and_every_link_leads_somewhere():
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = document.read_text()
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)", text):
            assert (document.parent / target).exists(), f"{document.name} → {target}"
    readme = (ROOT / "README.md").read_text()
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f"docs/{path.name}" not in readme]
    assert missing == []


def _commands(text: str) -> list[list[str]]:
    """What the lines after a prompt in the fenced blocks of a document run, as words; both sides of a pipe."""
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", text, re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(part, comments=True) for line in lines for part in line.split(" | ")]


def _resolve(words: list[str]) -> click.Command:
    """The command of the `tie` program that these words call."""
    from tie.cli.main import tie  # imports click's own world: only this test needs it

    command: click.Command = tie
    context = click.Context(command)
    for word in words:
        if not isinstance(command, click.Group) or word.startswith("-"):
            break
        found = command.get_command(context, word)
        assert found is not None, f"there is no `tie {' '.join(words)}`"
        command = found
    return command


def test_commands_in_the_readme_exist():
    done = subprocess.run([ROOT / "run", "--help"], capture_output=True, text=True, check=True, timeout=60)
    known_to_run = set(re.findall(r"(?m)^  ([a-z]+) ", done.stdout))
    checked = 0
    for words in _commands((ROOT / "README.md").read_text()):
        line = " ".join(words)
        if words[0] == "./run":
            assert words[1] in known_to_run, line
        program = words[1:] if words[0] == "./run" else words
        if program[0] == "tie":
            command = _resolve(program[1:])
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            used = {word.split("=")[0] for word in words if re.fullmatch(r"--[a-z][a-z-]*(=.*)?", word)}
            assert used <= known | {"--help", "--version"}, line
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("unit", sorted(path.name for path in (ROOT / "systemd").glob("*.service")))
def test_units_are_documented(unit):
    assert f"`{unit}`" in (ROOT / "docs/units.md").read_text()
