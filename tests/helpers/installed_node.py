"""A node that `tie install` has put on a machine of the system tests."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import wait_for

TIE = str(Path(sys.executable).with_name("tie"))  # of this checkout's environment, which the machine sees as well
INSTALLED = "/opt/tie/bin/tie"
PYTHON = "/opt/tie/bin/python"
MODEL = "smollm2-135m-instruct"
START_S = 180.0
BACK_S = 120.0
# As it comes; where it may take longer, with a root of its own for all that can have one.
CONTAINERS: tuple[str, ...] = ()
if os.environ.get("TIE_SLOW") == "1":
    CONTAINERS = ("--container=app", "--container=afm-runtime", "--container=model-owner")


def status(machine) -> dict:
    """What `tie status` says; empty while there is nobody who could say it."""
    return json.loads(machine.run(INSTALLED, "status", "--json", check=False).stdout or "{}")


def available(machine) -> bool:
    return status(machine).get("state") == "available"


@contextmanager
def running(machine, *options: str) -> Iterator[None]:
    """A node for the length of the block, available at its beginning; afterwards the machine is as it was.

    Args:
        machine: where.
        options: of its installation.
    """
    machine.run(TIE, "install", "--demo", "--start", *options, timeout=START_S + 300)
    try:
        wait_for(lambda: available(machine), "the node to be available", START_S)
        yield
    finally:
        machine.run(TIE, "uninstall", "--purge", timeout=180)
