"""Structured logs that cannot carry user data: static event names with allow-listed fields, one JSON object a line.

`log.event("runtime.ready", instance_id=...)`. A field that is not on the list is a bug and raises; a value that is not
a number, a boolean or one word (an identifier, a code, a path) is replaced by "?", so that text from a request cannot
slip in through a known field. Written to standard error, where systemd's journal (or `tie up`) takes it.
"""

import contextlib
import json
import math
import os
import re
import sys
import time
from typing import Final

# Every field any daemon may log. Identifiers, codes, counts and durations: nothing that a request carried.
FIELDS: Final = frozenset(
    {
        "action", "age_s", "attempt", "bundle", "bytes", "code", "count", "daemon", "device", "elapsed_s",
        "error_type", "executor", "exit_code", "from_state", "generation", "in_flight", "instance_id", "key_id",
        "latency_s", "layout", "model", "node_id", "peer", "peer_uid", "pid", "port", "rank", "reason", "release",
        "request_id", "running", "signal", "socket", "state", "status", "steps", "to_state", "unit", "verdict",
        "waiting", "where",
    }
)  # fmt: skip
_EVENT = re.compile(r"[a-z0-9]+(\.[a-z0-9-]+)+")
_WORD = re.compile(r"[A-Za-z0-9_./:@+,=-]{0,160}")

Value = str | int | float | bool | None


def event(name: str, **fields: Value) -> None:
    """Writes one line.

    Raises:
        ValueError: the name is not static-looking or a field is not allow-listed; both are bugs in the caller.
    """
    if not _EVENT.fullmatch(name):
        raise ValueError("log event names are lower case words joined by dots")
    unknown = fields.keys() - FIELDS
    if unknown:
        raise ValueError(f"log fields not on the allow-list: {sorted(unknown)}")
    record: dict[str, Value] = {"t": round(time.time(), 3), "event": name, "pid": os.getpid()}
    record.update({key: _clean(value) for key, value in fields.items()})
    # A daemon outlives its log: a closed pipe, a full disk or a file-size limit of zero costs the line, nothing else.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(json.dumps(record, separators=(",", ":")) + "\n")
        sys.stderr.flush()


def failure(name: str, error: BaseException, **fields: Value) -> None:
    """Writes an event for an exception: its type and the place it was raised, never its message."""
    where = "?"
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        where = f"{os.path.basename(code.co_filename)}:{traceback.tb_lineno}"  # noqa: PTH119 (start-up: no pathlib)
        traceback = traceback.tb_next
    event(name, error_type=type(error).__name__, where=where, **fields)


def _clean(value: object) -> Value:
    match value:
        case str():
            return value if _WORD.fullmatch(value) else "?"
        case float():
            return value if math.isfinite(value) else "?"  # JSON has neither infinity nor NaN
        case bool() | int() | None:
            return value
        case _:
            return "?"
