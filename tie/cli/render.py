"""Messages as JSON for programs, and the node's status as a table for people."""

from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tie.cli.reasons import why
from tie.proto import control_pb2, gpuhealth_pb2, owner_pb2, probe_pb2

_GOOD = {"available", "ready", "healthy", "connected", "sealed", "answers"}
_BAD = {"error", "in error", "unavailable", "failed", "not connected", "silent"}


def as_dict(message: Message) -> dict[str, Any]:
    """A message with all its fields, enums as lower-case words and numbers as numbers."""
    return {field.name: _value(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _value(field: Any, value: Any) -> Any:
    if field.is_repeated:
        return [_single(field, item) for item in value]
    return _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return as_dict(value)
    if field.enum_type is not None:
        return word(field.enum_type, value)
    return round(value, 4) if isinstance(value, float) else value


def word(kind: EnumDescriptor, number: int) -> str:
    """An enum value as words: STATE_IN_ERROR → "in error"; a number that this version does not know as itself."""
    value = kind.values_by_number.get(number)
    if value is None:
        return str(number)
    return value.name.partition("_")[2].replace("_", " ").lower()


def state_word(number: int) -> str:
    """A node state in words."""
    return word(control_pb2.State.DESCRIPTOR, number)


def duration(seconds: float) -> str:
    """12 s, 3 min, 2.5 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """269 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def status_table(status: control_pb2.NodeStatus) -> RenderableType:
    """The node at a glance."""
    title = Text.assemble((status.node_id, "bold"), "  ", _coloured(state_word(status.state)))
    title.append(f"  for {duration(status.state_age_s)}")
    if status.reasons:
        title.append(f"  ({', '.join(status.reasons)})")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("part", "state", "details"):
        table.add_column(heading)
    for name, state, details in (
        _runtime(status),
        _gpu(status),
        _owner(status),
        _prefixes(status),
        _cloudboard(status),
        *_keys_and_store(status),
    ):
        table.add_row(name, _coloured(state), details)
    lines: list[RenderableType] = [title]
    lines.extend(Text(f"  {code}: {why(code)}") for code in status.reasons)
    lines.extend(Text(f"  {code}: {why(code)}", style="red") for code in status.notes)
    if status.word:
        lines.append(Text(f'  "{status.word}"'))
    lines += [table, Text(_recycles(status), style="dim")]
    for event in list(status.events)[-5:]:
        change = f"{state_word(getattr(event, 'from'))} → {state_word(event.to)}"
        lines.append(Text(f"{duration(event.age_s):>8} ago  {change}  {event.reason}", style="dim"))
    return Group(*lines)


def _runtime(status: control_pb2.NodeStatus) -> tuple[str, str, str]:
    runtime = status.runtime
    if not status.probe_peer.connected:
        return "runtime", "not connected", ""
    canary = runtime.last_canary
    details = [
        f"instance {runtime.instance_id[:8]}" if runtime.instance_id else "",
        f"{runtime.model} {runtime.release}".strip(),
        runtime.executor,
        f"{runtime.running} running, {runtime.waiting} waiting",
        f"canary {canary.error or ('ok' if canary.ok else 'not yet')}"
        + (f" in {canary.latency_s * 1000:.0f} ms" if canary.ok else ""),
        ", ".join(runtime.reasons),
    ]
    return "runtime", word(probe_pb2.State.DESCRIPTOR, runtime.state), _join(details)


def _gpu(status: control_pb2.NodeStatus) -> tuple[str, str, str]:
    if not status.gpu_peer.connected:
        return "gpus", "not connected", ""
    gpu = status.gpu
    devices = ", ".join(device.name or device.id for device in gpu.devices)
    reasons = [*gpu.reasons, *(reason for device in gpu.devices for reason in device.reasons)]
    return (
        "gpus",
        word(gpuhealth_pb2.Verdict.DESCRIPTOR, gpu.verdict),
        _join([devices, f"{gpu.provider} provider", ", ".join(reasons)]),
    )


def _owner(status: control_pb2.NodeStatus) -> tuple[str, str, str]:
    if not status.owner_peer.connected:
        return "weights", "not connected", ""
    owner = status.owner
    if owner.state == owner_pb2.STATE_LOADING and owner.progress_total:
        return "weights", "loading", f"{100 * owner.progress_bytes / owner.progress_total:.0f} %"
    read = f"{size(owner.weight_bytes_read)} read from disk in {owner.loads} load{'s' * (owner.loads != 1)}"
    attached = f"attached {owner.attaches} time{'s' * (owner.attaches != 1)}"
    state = word(owner_pb2.State.DESCRIPTOR, owner.state)
    return "weights", state, _join([", ".join(owner.layouts), size(owner.arena_bytes), read, attached, owner.error])


def _prefixes(status: control_pb2.NodeStatus) -> tuple[str, str, str]:
    prefix = status.runtime.prefix
    if not status.probe_peer.connected:
        return "prefixes", "not connected", ""
    details = [
        f"{prefix.blocks} blocks, {prefix.hot_blocks} of them hot",
        size(status.owner.pool_bytes) if status.owner_peer.connected else "",
        "restored" if prefix.restored else "",
        f"{prefix.hits} hits, {prefix.tokens} tokens not computed",
    ]
    return "prefixes", prefix.state or "unknown", "" if prefix.state in {"", "none"} else _join(details)


def _cloudboard(status: control_pb2.NodeStatus) -> tuple[str, str, str]:
    if not status.cloudboard_peer.connected:
        return "cloudboard", "not connected", ""
    return "cloudboard", "connected", f"{status.in_flight} requests in flight"


def _keys_and_store(status: control_pb2.NodeStatus) -> list[tuple[str, str, str]]:
    """Rows for what a node may have: where nothing is known of it, there is none."""
    rows = [("keys", status.keys, "the key service, as CloudBoard sees it")] if status.keys else []
    if status.store_peer.connected or status.store_peer.age_s > 0:
        rows.append(("store", "connected" if status.store_peer.connected else "not connected", ""))
    return rows


def _recycles(status: control_pb2.NodeStatus) -> str:
    text = f"{status.recycles} recycle{'s' * (status.recycles != 1)}"
    if status.state in {control_pb2.STATE_DRAINING, control_pb2.STATE_RECYCLING}:
        text += f", one ({status.last_recycle_reason}) under way"
    elif status.last_recycle_s > 0:
        text += f", the last ({status.last_recycle_reason}) took {duration(status.last_recycle_s)}"
    if status.next_recycle_s > 0:
        text += f"; next in {duration(status.next_recycle_s)}"
    return text


def _join(parts: list[str]) -> str:
    return " · ".join(part for part in parts if part)


def _coloured(state: str) -> Text:
    style = "green" if state in _GOOD else "red" if state in _BAD else "yellow"
    return Text(state, style=style)
