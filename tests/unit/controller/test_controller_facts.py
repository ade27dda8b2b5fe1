"""Messages of other processes are checked before anything is built on them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllerd.attachment import _Stream
from controllerd.facts import gpu_of, owner_of, runtime_of
from controllerd.scrape import parse
from tie.daemon.errors import ProtocolError
from tie.proto import gpuhealth_pb2, owner_pb2, probe_pb2


@given(st.binary(max_size=300))
def test_any_bytes_that_parse_give_facts_or_a_protocol_error(payload: bytes) -> None:
    for kind, check in (
        (probe_pb2.RuntimeStatus, runtime_of),
        (owner_pb2.OwnerStatus, owner_of),
        (gpuhealth_pb2.NodeVerdict, lambda message: gpu_of(message, 6.0)),
    ):
        message = kind()
        try:
            message.ParseFromString(payload)
        except Exception:  # noqa: BLE001, S112 (the library's, and not what is tested)
            continue
        try:
            check(message)
        except ProtocolError:
            continue


@pytest.mark.parametrize(
    "fields",
    [
        {"state": probe_pb2.STATE_READY, "instance_id": ""},
        {"instance_id": "a b"},
        {"instance_id": "x" * 129},
        {"instance_id": "a", "model": "m" * 201},
        {"instance_id": "a", "release": "line\nbreak"},
        {"instance_id": "a", "reasons": ["Not A Code"]},
        {"instance_id": "a", "reasons": ["x"] * 65},
        {"instance_id": "a", "uptime_s": math.inf},
        {"instance_id": "a", "uptime_s": -1.0},
        {"instance_id": "a", "last_canary": probe_pb2.Canary(error="secret text")},
    ],
)
def test_an_impossible_status_is_refused(fields: dict) -> None:
    with pytest.raises(ProtocolError):
        runtime_of(probe_pb2.RuntimeStatus(**fields))


def test_a_probe_without_a_runtime_is_initializing() -> None:
    runtime = runtime_of(probe_pb2.RuntimeStatus(state=probe_pb2.STATE_INITIALIZING))
    assert (runtime.instance_id, runtime.ready, runtime.state) == ("", False, "initializing")


def test_unknown_numbers_are_not_ready() -> None:
    runtime = probe_pb2.RuntimeStatus(instance_id="a")
    runtime.ParseFromString(runtime.SerializeToString() + b"\x08\x63")  # state = 99
    assert not runtime_of(runtime).ready
    verdict = gpuhealth_pb2.NodeVerdict()
    verdict.ParseFromString(b"\x08\x63")
    assert not gpu_of(verdict, 6.0).fit


@pytest.mark.parametrize(("age", "fresh"), [(0.0, True), (6.0, True), (6.1, False), (-1.0, False)])
def test_old_data_is_not_fresh(age: float, fresh: bool) -> None:
    verdict = gpuhealth_pb2.NodeVerdict(verdict=gpuhealth_pb2.VERDICT_HEALTHY, age_s=age)
    assert gpu_of(verdict, 6.0).fresh == fresh


def test_a_verdict_without_an_age_is_impossible() -> None:
    with pytest.raises(ProtocolError):
        gpu_of(gpuhealth_pb2.NodeVerdict(age_s=math.nan), 6.0)


def test_acknowledgements_come_in_order() -> None:
    stream = _Stream()
    assert [stream.send(state) for state in (1, 2, 3)] == [1, 2, 3]
    assert stream.acknowledge(2) == 2
    assert stream.acknowledge(2) == 2  # again, unasked: what is in flight has changed
    assert stream.oldest_wait() >= 0
    for number in (1, 4, 0):
        with pytest.raises(ProtocolError):
            stream.acknowledge(number)
    assert stream.acknowledge(3) == 3
    assert stream.oldest_wait() == 0


@given(st.text(max_size=200))
def test_any_text_is_metrics_or_dropped(text: str) -> None:
    families = parse(text)
    assert families is None or isinstance(families, list)
