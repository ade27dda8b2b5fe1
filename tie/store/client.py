"""The client of tie-cache-stored: blocking, each call with its deadline. Light: the app loads it."""

import os
import secrets
from pathlib import Path
from typing import Final, Self

from google.protobuf.message import DecodeError

from kvxfer import seals
from kvxfer.channel import Channel
from kvxfer.errors import KvxferError, SealError
from tie.daemon.errors import TieError
from tie.proto import store_pb2

INDEX_BYTES: Final = 32


class StoreError(TieError):
    """The store does not do it; the caller does without a cache.

    Attributes:
        outcome: what it said; unspecified where it is gone, or says what it must not.
    """

    def __init__(self, text: str, outcome: "store_pb2.Outcome.ValueType" = store_pb2.OUTCOME_UNSPECIFIED) -> None:
        super().__init__(text)
        self.outcome = outcome


class StoreClient:
    """A connection to the store. Not for several threads at once.

    Args:
        path: its socket.
        timeout: seconds for each call.

    Raises:
        StoreError: nobody serves it.
    """

    def __init__(self, path: Path, *, timeout: float) -> None:
        self._timeout = timeout
        try:
            self._channel = Channel.connect(path, timeout=timeout)
        except KvxferError as error:
            raise StoreError(f"the cache store does not answer: {error}") from None

    def new(self, size: int, *, transient: bool = False) -> int:
        """A writable memfd of `size` bytes for an entry to come; the caller seals its content and closes it.

        Args:
            size: exact bytes of the entry.
            transient: whether it ends with this connection at the latest. No other entry makes room for such a one.

        Raises:
            StoreError: too large, no room, or the store is gone.
        """
        outcome, descriptor = self._call(
            store_pb2.StoreRequest(new=store_pb2.New(size=size, transient=transient)), 0, size
        )
        return _must(outcome, descriptor)

    def put(self, index: bytes, *, ttl_s: float = 0) -> None:
        """Files what `new` gave last. Its content must be sealed (`kvxfer.seals.CONTENT`).

        Args:
            index: under which it is found.
            ttl_s: how long it lives; 0: as long as the store allows.

        Raises:
            StoreError: it is not, or the store is gone.
        """
        put = store_pb2.Put(index=index, ttl_ms=int(ttl_s * 1000))
        outcome, _ = self._call(store_pb2.StoreRequest(put=put), None, None)
        if outcome != store_pb2.OUTCOME_DONE:
            raise _refused(outcome)

    def get(self, index: bytes) -> tuple[int, int] | None:
        """Descriptor and size of an entry that nobody can change; the caller closes it. None: there is none.

        Raises:
            StoreError: the store is gone, or gives something else.
        """
        outcome, descriptor = self._call(store_pb2.StoreRequest(get=store_pb2.Get(index=index)), seals.IMMUTABLE, None)
        if outcome == store_pb2.OUTCOME_MISS:
            return None
        descriptor = _must(outcome, descriptor)
        return descriptor, os.fstat(descriptor).st_size

    def drop(self, index: bytes) -> bool:
        """Lets go of an entry; false when there is none.

        Raises:
            StoreError: the store is gone.
        """
        outcome, _ = self._call(store_pb2.StoreRequest(drop=store_pb2.Drop(index=index)), None, None)
        return _done_or_miss(outcome)

    def renew(self, index: bytes, *, ttl_s: float = 0) -> bool:
        """Makes an entry as young as if it had been put now; false when there is none.

        Raises:
            StoreError: the store is gone.
        """
        renew = store_pb2.Renew(index=index, ttl_ms=int(ttl_s * 1000))
        outcome, _ = self._call(store_pb2.StoreRequest(renew=renew), None, None)
        return _done_or_miss(outcome)

    def close(self) -> None:
        """Ends the connection; what `new` gave and `put` did not file is gone."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self, request: store_pb2.StoreRequest, needed: int | None, size: int | None
    ) -> tuple["store_pb2.Outcome.ValueType", int | None]:
        """One request and its reply.

        Args:
            request: what is asked.
            needed: the seals that a descriptor in the reply must have; None where none may come.
            size: its size, where the caller knows it.
        """
        try:
            self._channel.send(request.SerializeToString(), timeout=self._timeout)
            message, descriptors = self._channel.receive(timeout=self._timeout)
        except KvxferError as error:
            raise StoreError(f"the cache store does not answer: {error}") from None
        try:
            reply = store_pb2.StoreReply.FromString(message)
            for descriptor in descriptors:
                seals.require(descriptor, needed or 0, reply.size if size is None else size)
            agreed = len(descriptors) == (needed is not None and reply.outcome == store_pb2.OUTCOME_DONE)
        except (DecodeError, SealError):
            agreed = False
        if not agreed:
            for descriptor in descriptors:
                os.close(descriptor)
            raise StoreError("the cache store sent what it must not") from None
        return reply.outcome, descriptors[0] if descriptors else None


def random_index() -> bytes:
    """An index for an entry that another one names."""
    return secrets.token_bytes(INDEX_BYTES)


def _must(outcome: "store_pb2.Outcome.ValueType", descriptor: int | None) -> int:
    if descriptor is None:
        raise _refused(outcome)
    return descriptor


def _done_or_miss(outcome: "store_pb2.Outcome.ValueType") -> bool:
    if outcome not in {store_pb2.OUTCOME_DONE, store_pb2.OUTCOME_MISS}:
        raise _refused(outcome)
    return outcome == store_pb2.OUTCOME_DONE


def _refused(outcome: "store_pb2.Outcome.ValueType") -> StoreError:
    known = outcome in store_pb2.Outcome.values()
    return StoreError(f"the cache store refuses: {store_pb2.Outcome.Name(outcome) if known else outcome}", outcome)
