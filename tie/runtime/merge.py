"""Joins the events that gathered while Triton was busy, so that many streams need fewer responses than tokens."""

from collections.abc import Iterable

from tie.proto import runtime_pb2


def merge(events: Iterable[runtime_pb2.GenerateEvent]) -> list[runtime_pb2.GenerateEvent]:
    """Joins neighbouring tokens of one choice: the ids follow one another, the last one's `hold_bytes` counts."""
    merged: list[runtime_pb2.GenerateEvent] = []
    for event in events:
        previous = merged[-1] if merged else None
        if (
            previous is not None
            and previous.HasField("tokens")
            and event.HasField("tokens")
            and previous.tokens.index == event.tokens.index
        ):
            # For repeated fields MergeFrom appends; hold_bytes of 0 is absent and would not overwrite.
            hold = event.tokens.hold_bytes
            previous.tokens.MergeFrom(event.tokens)
            previous.tokens.hold_bytes = hold
        else:
            merged.append(event)
    return merged
