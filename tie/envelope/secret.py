"""Key bytes that can be wiped and do not show themselves."""

import secrets
from typing import NoReturn, Self


class Secret:
    """A key in one mutable buffer, zeroed by `close` and at the end of a `with` block.

    Copies that libraries make (the AES key schedule, protobuf's bytes) are beyond reach: a process that held a key is
    clean only once it has exited. This shortens the time in which a key lies about, and keeps it out of logs.
    """

    __slots__ = ("_buffer",)

    def __init__(self, data: bytes | bytearray) -> None:
        self._buffer = bytearray(data)

    @classmethod
    def random(cls, size: int) -> Self:
        """`size` bytes from the kernel."""
        return cls(secrets.token_bytes(size))

    def reveal(self) -> bytearray:
        """The buffer itself, not a copy.

        Raises:
            ValueError: the secret has been wiped.
        """
        if not self._buffer:
            raise ValueError("the secret has been wiped")
        return self._buffer

    def close(self) -> None:
        """Zeroes the buffer and drops it."""
        self._buffer[:] = bytes(len(self._buffer))
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._buffer)

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is never serialized")
