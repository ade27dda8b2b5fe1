"""Padding: every frame is exactly one bucket, and what is inside stays what it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.daemon.config import DEFAULT_BUCKETS
from tie.daemon.padding import PaddingError, pad, room
from tie.proto import app_pb2


def frame_of(size: int) -> app_pb2.AppOut:
    """An AppOut whose serialized size, before padding, is `size` (0, 2, or at least 6)."""
    frame = app_pb2.AppOut()
    if size == 2:
        frame.ready.SetInParent()
    elif size:
        for overhead in (4, 5, 6, 7, 8):
            frame.delta.text = "x" * max(0, size - overhead)
            if frame.ByteSize() == size:
                break
    return frame


@pytest.mark.parametrize("buckets", [DEFAULT_BUCKETS, (32, 1024), (40000,)])
def test_every_size_up_to_the_room_is_padded_to_a_bucket(buckets):
    missed = []
    for size in [0, 2, *range(6, room(buckets) + 1, 1 if room(buckets) < 20000 else 7)]:
        frame = frame_of(size)
        if frame.ByteSize() != size:
            continue  # the message's own varints skip a few sizes
        payload = pad(frame, buckets)
        smallest = min(bucket for bucket in buckets if bucket >= size and bucket - size != 1)
        if len(payload) != smallest:
            missed.append(size)
    assert missed == []


def test_gaps_at_which_the_length_prefix_grows_are_met():
    # 130 = tag + 1-byte length + 128 would need a 2-byte length; 16387 the same one step later.
    for gap in (2, 3, 129, 130, 131, 16386, 16387, 16388):
        size = 20000 - gap
        payload = pad(frame_of(size), (20000,))
        parsed = app_pb2.AppOut.FromString(payload)
        assert len(payload) == 20000
        assert parsed.padding == bytes(len(parsed.padding))
        assert len(parsed.delta.text) == len(frame_of(size).delta.text)


def test_a_gap_of_one_takes_the_next_bucket():
    assert len(pad(frame_of(63), (64, 128))) == 128
    with pytest.raises(PaddingError):
        pad(frame_of(63), (64,))


def test_a_frame_over_the_largest_bucket_is_refused():
    with pytest.raises(PaddingError):
        pad(frame_of(1025), (64, 1024))


def test_a_frame_that_carries_padding_already_is_refused():
    with pytest.raises(PaddingError):
        pad(app_pb2.AppOut(padding=b"\0"), DEFAULT_BUCKETS)


texts = st.text(max_size=4000)


@given(
    st.one_of(
        st.builds(lambda i, t: app_pb2.AppOut(delta=app_pb2.Delta(index=i, text=t)), st.integers(0, 20), texts),
        st.builds(
            lambda s, d: app_pb2.AppOut(done=app_pb2.Done(status=s, detail=d)),
            st.sampled_from(app_pb2.Status.values()),
            texts,
        ),
        st.just(app_pb2.AppOut(ready=app_pb2.Ready())),
    )
)
def test_any_frame_keeps_its_meaning_and_has_a_bucket_size(frame):
    before = frame.SerializeToString(deterministic=True)
    try:
        payload = pad(frame, DEFAULT_BUCKETS)
    except PaddingError:
        assert len(before) > room(DEFAULT_BUCKETS)
        return
    assert len(payload) in DEFAULT_BUCKETS
    parsed = app_pb2.AppOut.FromString(payload)
    parsed.ClearField("padding")
    assert parsed == frame
    assert frame.SerializeToString(deterministic=True) == before
