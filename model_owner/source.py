"""The weight files while they are packed: rows of tensors by name, checked; and what a packing makes of them."""

import threading
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

import numpy as np

from model_owner.arena import Arena
from tie.assets.tensors import Float32, Raw, StoredTensor, read_groups, read_rows
from tie.bones.native.packing import Groups
from tie.daemon.errors import BundleError, TieError

PIECE_VALUES: Final = 1 << 18  # values converted at a time: source, float32 and result stay in the cache


class CancelledError(TieError):
    """The owner is shutting down in the middle of a load."""


class Source:
    """A bundle's tensors.

    Args:
        tensors: where they lie.
        files: the weight files' bytes.
        cancelled: ends the reading.
    """

    def __init__(self, tensors: Iterable[StoredTensor], files: Mapping[str, Raw], cancelled: threading.Event) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self._files = files
        self._cancelled = cancelled

    def rows(self, name: str, start: int, stop: int) -> Float32:
        """Rows of a tensor, [stop - start, columns], in Hugging Face's order.

        Raises:
            BundleError: a value is not finite.
            CancelledError: the owner is shutting down.
        """
        tensor, raw = self._raw(name)
        values = read_rows(tensor, raw, start, stop)
        if not np.isfinite(values).all():
            raise BundleError(f"tensor {name} holds values that are not finite")
        return values

    def groups(self, name: str, start: int, stop: int) -> Groups | None:
        """The same rows as they are stored, if that is in groups of 32 with a scale.

        Raises:
            BundleError: a value is not finite.
            CancelledError: the owner is shutting down.
        """
        tensor, raw = self._raw(name)
        found = read_groups(tensor, raw, start, stop)
        if found and not (
            np.isfinite(found.scales).all() and (found.minima is None or np.isfinite(found.minima).all())
        ):
            raise BundleError(f"tensor {name} holds values that are not finite")
        return found

    def _raw(self, name: str) -> tuple[StoredTensor, Raw]:
        if self._cancelled.is_set():
            raise CancelledError("shutting down")
        tensor = self.tensors[name]
        return tensor, self._files[tensor.file][tensor.offset : tensor.offset + tensor.bytes]


class Packed(Protocol):
    """One tensor of a layout."""

    @property
    def name(self) -> str:
        """In the table."""
        ...

    @property
    def dtype(self) -> str:
        """In the table: "f32", "bf16", "u8"."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """In the table."""
        ...

    @property
    def bytes(self) -> int:
        """Its size."""
        ...

    def fill(self, source: Source, arena: Arena, offset: int) -> None:
        """Writes it to its place in the arena.

        Raises:
            BundleError: the weights are damaged.
            CancelledError: the owner is shutting down.
        """
        ...
