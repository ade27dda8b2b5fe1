"""Entries of a store, filed and read, and what its daemon counts."""

import mmap
import os

import grpc
import pytest

from kvxfer import seals
from tie.proto import metrics_pb2, metrics_pb2_grpc, store_pb2
from tie.store.client import StoreClient, StoreError


def put(client: StoreClient, index: bytes, content: bytes, ttl_s: float = 0) -> None:
    """Files an entry."""
    descriptor = client.new(len(content))
    try:
        with mmap.mmap(descriptor, len(content)) as mapping:
            mapping[:] = content
        seals.add(descriptor, seals.CONTENT)
        client.put(index, ttl_s=ttl_s)
    finally:
        os.close(descriptor)


def get(client: StoreClient, index: bytes) -> bytes | None:
    """An entry's content, or None."""
    found = client.get(index)
    if found is None:
        return None
    descriptor, size = found
    try:
        return os.pread(descriptor, size, 0)
    finally:
        os.close(descriptor)


def refusal(call, *arguments) -> "store_pb2.Outcome.ValueType":
    """With what a call is refused."""
    with pytest.raises(StoreError) as caught:
        call(*arguments)
    return caught.value.outcome


def metrics(store) -> dict[str, float]:
    """What the daemon counts, by name and labels."""
    with grpc.insecure_channel(f"unix:{store.config.sockets.store_control}") as channel:
        text = metrics_pb2_grpc.MetricsStub(channel).Scrape(metrics_pb2.ScrapeRequest(), timeout=10).text
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
