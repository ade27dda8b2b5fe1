"""Clients that are none, and a store that is none."""

import os
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from descriptors import open_descriptors
from kvxfer import seals
from kvxfer.channel import Channel
from store_entries import metrics
from tie.proto import store_pb2
from tie.store.client import StoreClient, StoreError, random_index
from waiting import wait_for


def send_for_ever(connection: socket.socket, message: bytes) -> None:
    while True:
        connection.send(message, socket.MSG_NOSIGNAL)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(min_size=1, max_size=2000), min_size=1, max_size=4))
def test_noise_costs_its_sender_the_connection_and_nobody_else_anything(store, messages):
    with Channel.connect(store.path, timeout=10) as channel:
        for message in messages:
            try:
                channel.send(message, timeout=10)
            except Exception:  # noqa: BLE001 (the store has hung up already)
                break
    with store.client() as client:
        assert client.get(random_index()) is None


@pytest.mark.parametrize(
    "request_",
    [
        store_pb2.StoreRequest(),
        store_pb2.StoreRequest(get=store_pb2.Get(index=b"short")),
        store_pb2.StoreRequest(put=store_pb2.Put(index=b"i" * 32)),  # nothing is being written
        store_pb2.StoreRequest(put=store_pb2.Put(index=b"i" * 33)),
        store_pb2.StoreRequest(drop=store_pb2.Drop()),
        store_pb2.StoreRequest(renew=store_pb2.Renew(index=b"i" * 2000)),
    ],
)
def test_requests_that_cannot_be_end_the_connection(store, request_):
    with Channel.connect(store.path, timeout=10) as channel:
        channel.send(request_.SerializeToString() or b"\0", timeout=10)
        reply = store_pb2.StoreReply.FromString(channel.receive(timeout=10)[0])
        assert reply.outcome == store_pb2.OUTCOME_INVALID
        with pytest.raises(Exception, match="closed"):
            channel.receive(timeout=10)


def test_descriptors_that_a_client_sends_are_closed(store):
    with store.client() as client:
        assert client.get(random_index()) is None  # it has been accepted
        before = store.descriptors()
        request = store_pb2.StoreRequest(get=store_pb2.Get(index=random_index())).SerializeToString()
        for _ in range(20):
            client._channel.send(request, [client._channel.fileno()] * 8, timeout=10)
            client._channel.receive(timeout=10)
        assert store.descriptors() == before


def test_a_client_that_does_not_read_is_let_go_of(store):
    request = store_pb2.StoreRequest(get=store_pb2.Get(index=random_index())).SerializeToString()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.connect(str(store.path))
        deaf.settimeout(10)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_for_ever(deaf, request)
    with store.client() as client:
        assert client.get(random_index()) is None


def test_a_client_that_writes_for_too_long_loses_its_place(make_store):
    store = make_store(write_deadline_s=0.1)
    with store.client() as client:
        descriptor = client.new(5000)
        wait_for(lambda: metrics(store)["tie_store_reserved_bytes"] == 0)
        with pytest.raises(StoreError):
            client.put(random_index())
        os.close(descriptor)


def test_too_many_clients_are_refused_and_the_rest_served(make_store):
    store = make_store(max_connections=2)
    wait_for(lambda: metrics(store)["tie_store_connections"] == 0)
    with store.client() as one, store.client() as other:
        assert one.get(random_index()) is None
        assert other.get(random_index()) is None
        with store.client() as third, pytest.raises(StoreError):
            third.get(random_index())
        assert one.get(random_index()) is None


def test_a_hostile_store_cannot_hurt_its_client(tmp_path):
    """What it sends is checked before it is used, and what is refused is closed."""
    before = open_descriptors()
    ours, theirs = Channel.pair()
    client = StoreClient.__new__(StoreClient)
    client._channel, client._timeout = ours, 1
    unsealed, sealed = seals.create("unsealed", 100), seals.create("sealed", 100)
    seals.add(sealed, seals.IMMUTABLE)
    done = store_pb2.StoreReply(outcome=store_pb2.OUTCOME_DONE, size=100)
    for message, descriptors in (
        (done, []),
        (done, [unsealed]),
        (done, [sealed, sealed]),
        (store_pb2.StoreReply(outcome=store_pb2.OUTCOME_DONE, size=99), [sealed]),
        (store_pb2.StoreReply(outcome=store_pb2.OUTCOME_MISS), [sealed]),
        (store_pb2.StoreReply(outcome=77), []),
        (b"\xff" * 40, [sealed]),
    ):
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        theirs.send(raw, descriptors, timeout=1)
        with pytest.raises(StoreError):
            client.get(b"i" * 32)
    for descriptor in (unsealed, sealed):
        os.close(descriptor)
    ours.close()
    theirs.close()
    assert open_descriptors() == before
