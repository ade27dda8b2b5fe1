"""A conversation's later turns on a node under real systemd: what the sandboxed processes file, they find again.

The app opens and seals its entries with a list of system calls, a root and limits of its own: what only the unit
forbids shows in no other test. The client is the installed one.
"""

import json
import secrets
from itertools import pairwise

import pytest

from installed_node import BACK_S, CONTAINERS, INSTALLED, PYTHON, available, running

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SAVED_S = 30.0
SAVED = "app.conversation-saved"
UNUSED = "app.cache-unused"
BLOCK = 16
# One turn; its history and key come in, its answer goes out.
_TURN = """
import json, sys
from pathlib import Path
from tie.cli.exits import exit_code
from tie.daemon.errors import TieError
from tie.device.client import Client
asked = json.load(sys.stdin)
with Client("http://127.0.0.1:8443", Path("/run/tie/keys/statement.pub")) as client:
    options = {"turn_key": bytes.fromhex(asked["turn_key"])} if asked["turn_key"] else {}
    try:
        result = client.chat(
            asked["messages"], model="smollm2-135m-instruct", max_tokens=24, temperature=0.0, **options
        ).result()
    except TieError as error:
        sys.exit(exit_code(error))
print(json.dumps({"text": result.text, "prompt": result.prompt_tokens, "cached": result.cached_tokens}))
"""


@pytest.fixture(scope="module")
def node(bare_machine):
    """The machine with a node that is available; afterwards it is as it was."""
    with running(bare_machine, *CONTAINERS):
        yield bare_machine


@pytest.fixture
def say(node, wait):
    """One turn of a conversation; with a key, until it has been saved."""

    def apps(event: str) -> int:
        return node.journal("tie-cloud-app@*").count(event)

    def say(messages: list[dict[str, str]], turn_key: str) -> dict:
        saved, ended = apps(SAVED), []
        asked = json.dumps({"messages": messages, "turn_key": turn_key})

        def answered() -> bool:
            ended.append(node.run(PYTHON, "-c", _TURN, stdin=asked, check=False))
            assert ended[-1].returncode in (0, 75), ended[-1].stderr  # busy: CloudBoard hears of a recycle's end later
            return ended[-1].returncode == 0

        wait("an answer", answered, BACK_S)
        answer = json.loads(ended[-1].stdout)
        if turn_key:
            wait("the turn to be saved", lambda: apps(SAVED) > saved, SAVED_S)
        messages.append({"role": "assistant", "content": answer["text"]})
        return answer

    return say


@pytest.mark.parametrize("sentences", [4, 80])
def test_later_turns_are_restored_from_the_store(node, say, wait, sentences):
    """By the runtime that computed them and by a fresh one; from small pages, and with the longer history huge ones."""
    key = secrets.token_hex(32)
    said = f"The river number {secrets.randbelow(1000)} is long and deep. " * sentences
    messages = [{"role": "user", "content": f"{said}Name a river."}]
    turns = [say(messages, key)]
    for question in ("Where does it end?", "Who lives there?"):
        if len(turns) == 2:
            node.run(INSTALLED, "recycle", timeout=BACK_S)
            wait("the node to be available", lambda: available(node), BACK_S)
        messages.append({"role": "user", "content": question})
        turns.append(say(messages, key))
    cached = [turn["cached"] for turn in turns]
    for before, turn in pairwise(turns):
        assert turn["cached"] % BLOCK == 0
        assert turn["cached"] > before["prompt"] - BLOCK, "all that the turn before had to read"
    assert cached[0] < cached[1] < cached[2]
    # The same history without the key: nothing of it is found, so that the tokens above came from the store.
    assert say(messages[:-1], "")["cached"] == cached[0]
    assert UNUSED not in node.journal("tie-cloud-app@*")
    assert "status=31/SYS" not in node.journal("tie-cloud-app@*")
