"""Waiting, with a deadline, for what another thread or process does and tells nobody of."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WAIT_S = 30.0


def wait_for(condition: Callable[[], T], what: str = "", seconds: float = WAIT_S) -> T:
    """Looks again and again until `condition` gives something true; gives that.

    Raises:
        AssertionError: it did not within so many seconds; says `what`.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
    return found
