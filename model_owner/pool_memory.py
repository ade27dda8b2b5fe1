"""Memory of a prefix pool and its metadata: found, sealed, and given back where nobody wants it any more.

To find a gigabyte of memory, or to read and hash metadata, takes time: it is done on another thread.
"""

import asyncio
import hashlib
import hmac
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec

from kvxfer import seals
from kvxfer.errors import KvxferError
from model_owner.arena import ArenaError, allocate, sealed_copy
from tie.proto import owner_pb2

_THREADS: Final = ThreadPoolExecutor(4, "prefix-pools")
_P = ParamSpec("_P")
Descriptors = tuple[int, int]  # of a pool and its metadata


class PoolRefusedError(Exception):
    """What was asked for is not possible now, or not at all.

    Attributes:
        code: stable.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


async def made_aside(make: Callable[_P, Descriptors], *arguments: _P.args, **named: _P.kwargs) -> Descriptors:
    """The descriptors that `make` makes on another thread; when nobody waits for them any more, they are closed."""
    making = _THREADS.submit(make, *arguments, **named)
    try:
        return await asyncio.shield(asyncio.wrap_future(making))
    except asyncio.CancelledError:
        making.add_done_callback(_close_made)
        raise


def _close_made(making: Future[Descriptors]) -> None:
    if making.exception() is None:
        for descriptor in making.result():
            os.close(descriptor)


def duplicates(descriptors: Descriptors) -> Descriptors:
    """Descriptors for a thread of its own: the pool's may be closed meanwhile.

    Raises:
        OSError: there is none left.
    """
    pool = os.dup(descriptors[0])
    try:
        return pool, os.dup(descriptors[1])
    except OSError:
        os.close(pool)
        raise


def room(pool_bytes: int, metadata_bytes: int) -> Descriptors:
    """Memory for a pool and its metadata.

    Raises:
        ArenaError: there is none.
    """
    pool = allocate("tie-prefix-pool", pool_bytes)
    try:
        return pool, allocate("tie-prefix-metadata", metadata_bytes)
    except ArenaError:
        os.close(pool)
        raise


def sealed(pool: int, metadata: int, request: owner_pb2.PoolSeal) -> Descriptors:
    """The pool, sealed, and a sealed copy of its metadata, both for reading only; closes the descriptors given.

    Raises:
        PoolRefusedError: the metadata is not what is said of it.
        ArenaError: no memory for the copy.
        KvxferError: the kernel does not seal.
        OSError: there is no descriptor left.
    """
    try:
        content = os.pread(metadata, request.metadata_bytes, 0)
        if not hmac.compare_digest(hashlib.sha256(content).digest(), request.metadata_sha256):
            raise PoolRefusedError("metadata-mismatch")
        seals.add(pool, seals.READ_ONLY_FOR_OTHERS)
        blocks = seals.read_only(pool)  # one thing less for a client to try
        try:
            return blocks, sealed_copy("tie-prefix-metadata", content)
        except (ArenaError, KvxferError, OSError):
            os.close(blocks)
            raise
    finally:
        os.close(pool)
        os.close(metadata)
