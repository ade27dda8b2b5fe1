"""Messages between ranks: as long as they like, whole or not at all; batches as they were."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.channel import MAX_MESSAGE, Channel
from tie.bones.batch import Batch, SequenceSlice
from tie.daemon.errors import PeerDiedError, PeerTimeoutError, ProtocolError
from tie.proto import ranks_pb2
from tie.runtime.rank_channel import RankChannel, batch_of, step_of

WAIT_S = 10.0
numbers = st.integers(0, 1 << 31)


@pytest.fixture
def ends():
    channels = Channel.pair()
    yield tuple(map(RankChannel, channels))
    for channel in channels:
        channel.close()


@given(
    st.lists(
        st.builds(
            SequenceSlice,
            st.lists(numbers, max_size=5),
            numbers,
            st.lists(numbers, max_size=5),
            numbers,
            st.none() | st.integers(0, 1 << 60),
        ),
        max_size=4,
    ),
    st.lists(st.tuples(numbers, numbers), max_size=3),
)
def test_a_batch_arrives_as_it_was(slices, copies):
    batch = Batch(tuple(slices), tuple(copies))
    message = ranks_pb2.ToRank.FromString(step_of(batch).SerializeToString())
    assert batch_of(message.step) == batch


@pytest.mark.parametrize("size", [0, 1, MAX_MESSAGE - 5, MAX_MESSAGE, 5 * MAX_MESSAGE])
def test_a_message_may_be_longer_than_a_packet(ends, size):
    ours, theirs = ends
    sent = ranks_pb2.Start(rank=1, config=os.urandom(size))
    sending = threading.Thread(target=ours.send, args=(sent, [0]), kwargs={"timeout": WAIT_S})
    sending.start()
    received, descriptors = theirs.receive(ranks_pb2.Start, timeout=WAIT_S)
    sending.join(WAIT_S)
    assert received == sent
    assert len(descriptors) == 1
    os.close(descriptors[0])


def test_nobody_and_nothing_are_errors(ends):
    ours, theirs = ends
    with pytest.raises(PeerTimeoutError):
        theirs.receive(ranks_pb2.Start, timeout=0.01)
    ours.close()
    with pytest.raises(PeerDiedError):
        theirs.receive(ranks_pb2.Start, timeout=WAIT_S)
    with pytest.raises(PeerDiedError):
        theirs.send(ranks_pb2.Start(), timeout=WAIT_S)


@given(st.binary(min_size=1, max_size=200).map(lambda data: b"\1" + data))
def test_other_bytes_are_no_message_or_one(data):
    ours, theirs = Channel.pair()
    with ours, theirs:
        ours.send(data, timeout=WAIT_S)
        try:
            message, _ = RankChannel(theirs).receive(ranks_pb2.ToRank, timeout=WAIT_S)
        except ProtocolError:
            return
        assert isinstance(message, ranks_pb2.ToRank)


def test_an_odd_number_of_copies_is_refused():
    with pytest.raises(ValueError, match="zip"):
        batch_of(ranks_pb2.Step(copies=[1, 2, 3]))
