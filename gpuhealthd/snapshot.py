"""What one look at the hardware found: the message from the prober child to its parent, and the input of `classify`.

A reading either has a value or was not measured; not measured is a word of its own, neither zero nor healthy. The
structs double as the wire format (JSON, strict): everything that the child sends is bounded here.
"""

from typing import Annotated, Final, Literal

import msgspec

from tie.daemon.errors import ProtocolError

MAX_MESSAGE_BYTES: Final = 128 * 1024

Code = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9]+(-[a-z0-9]+)*\Z", max_length=48)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9_]*\Z", max_length=48)]
Unit = Literal["", "bytes", "celsius", "percent", "ratio", "watts", "count", "mask", "enum"]
Label = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9 ._:/()@-]{1,96}\Z", max_length=96)]
Provider = Literal["cpu", "nvml"]
XidNumber = Annotated[int, msgspec.Meta(ge=0, le=100_000)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A strictly decoded part of a snapshot."""


class Reading(_Message, frozen=True):
    """One quantity; `value` is None when it was not measured."""

    name: Name
    value: float | None
    unit: Unit = ""


class Device(_Message, frozen=True):
    """One GPU, or the CPU as a whole.

    Attributes:
        id: the GPU's UUID, or "cpu0"; "pci ADDRESS" for one of which only the kernel's log speaks.
        formerly: the id that this GPU has where only the kernel's log speaks of it.
        faults: calls whose return code is itself a fault, as stable codes ("gpu-lost").
        xids: XID numbers that the driver's events brought since the snapshot before, oldest first.
        log_xids: those that the kernel's log brought: often the same ones once more.
        fatal_xids: those of `log_xids` whose line says "Fatal".
    """

    id: Label
    name: Label
    readings: Annotated[tuple[Reading, ...], msgspec.Meta(max_length=64)] = ()
    faults: Annotated[tuple[Code, ...], msgspec.Meta(max_length=16)] = ()
    xids: Annotated[tuple[XidNumber, ...], msgspec.Meta(max_length=64)] = ()
    log_xids: Annotated[tuple[XidNumber, ...], msgspec.Meta(max_length=4096)] = ()
    fatal_xids: Annotated[tuple[XidNumber, ...], msgspec.Meta(max_length=4096)] = ()
    formerly: Label | None = None


class Snapshot(_Message, frozen=True):
    """One complete look.

    Attributes:
        taken_s: CLOCK_MONOTONIC when the look began (one clock for all processes of a machine; time(7)).
        faults: of the provider as a whole ("driver-missing").
        log_position: the last record of the kernel's log that was read; None while it cannot be.
    """

    provider: Provider
    taken_s: float
    devices: Annotated[tuple[Device, ...], msgspec.Meta(max_length=64)] = ()
    faults: Annotated[tuple[Code, ...], msgspec.Meta(max_length=16)] = ()
    log_position: Annotated[int, msgspec.Meta(ge=-1)] | None = None


_DECODER = msgspec.json.Decoder(Snapshot)


def encode(snapshot: Snapshot) -> bytes:
    """The wire form of `snapshot`."""
    return msgspec.json.encode(snapshot)


def decode(payload: bytes) -> Snapshot:
    """Reads what the prober child sent.

    Raises:
        ProtocolError: too large, not JSON, a field of the wrong type, size or name, or two devices of one id.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError("snapshot over the size limit")
    try:
        snapshot = _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ProtocolError("not a snapshot") from None
    if len({device.id for device in snapshot.devices}) != len(snapshot.devices):
        raise ProtocolError("two devices of one id")
    return snapshot


def label(text: str) -> str:
    """`text` as a `Label`: characters outside the alphabet become "_", at most 96, never empty."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in " ._:/()@-") else "_" for c in text[:96])
    return kept or "unknown"
