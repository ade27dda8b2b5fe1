"""What the child sends is checked; what /proc says is read with care."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealthd.cpu import CpuProvider, read_pressure
from gpuhealthd.snapshot import MAX_MESSAGE_BYTES, Device, Reading, Snapshot, decode, encode, label
from tie.daemon.errors import ProtocolError

SNAPSHOT = Snapshot(
    "nvml",
    1.5,
    (
        Device(
            "GPU-1",
            "A GPU",
            (Reading("temperature_c", 40.0, "celsius"), Reading("power_w", None)),
            ("gpu-lost",),
            (79,),
        ),
    ),
)


def test_a_snapshot_survives_the_wire() -> None:
    assert decode(encode(SNAPSHOT)) == SNAPSHOT


@given(st.binary(max_size=400))
def test_any_bytes_are_a_snapshot_or_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


@given(st.data())
def test_a_changed_snapshot_is_a_snapshot_or_a_protocol_error(data: st.DataObject) -> None:
    payload = bytearray(encode(SNAPSHOT))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        snapshot = decode(bytes(payload))
    except ProtocolError:
        return
    assert isinstance(snapshot, Snapshot)


@pytest.mark.parametrize(
    "change",
    [
        {"provider": "other"},
        {"extra": 1},
        {"taken_s": "now"},
        {"faults": ["Not A Code"]},
        {"faults": ["x"] * 17},
        {"devices": [{"id": "a", "name": "b", "xids": [-1]}]},
        {"devices": [{"id": "a", "name": "b", "readings": [{"name": "x", "value": "1"}]}]},
        {"devices": [{"id": "a", "name": "b", "readings": [{"name": "x", "value": 1.0, "unit": "furlongs"}]}]},
        {"devices": [{"id": "a", "name": "b"}, {"id": "a", "name": "b"}]},
        {"devices": [{"id": "a\n", "name": "b"}]},
    ],
)
def test_impossible_snapshots_are_refused(change: dict) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.json.encode({"provider": "cpu", "taken_s": 1.0, **change}))


@pytest.mark.parametrize("text", ["1e999", "NaN", "Infinity"])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    payload = b'{"provider":"cpu","taken_s":1.0,"devices":[{"id":"a","name":"b","readings":[{"name":"x","value":%s}]}]}'
    with pytest.raises(ProtocolError):
        decode(payload % text.encode())


def test_size_is_bounded() -> None:
    with pytest.raises(ProtocolError):
        decode(b" " * (MAX_MESSAGE_BYTES + 1))


@given(st.text())
def test_any_text_becomes_a_label(text: str) -> None:
    device = Device(label(text), label(text))
    assert decode(encode(Snapshot("cpu", 0.0, (device,)))).devices == (device,)


# ---- the cpu provider ----


def test_the_cpu_provider_really_looks() -> None:
    snapshot = CpuProvider().look()
    values = {reading.name: reading.value for reading in snapshot.devices[0].readings}
    available, total = values["available_bytes"], values["total_bytes"]
    assert available is not None
    assert total is not None
    assert 0 < available <= total
    assert values["load1_per_core"] is not None
    assert decode(encode(snapshot)) == snapshot


def test_pressure_is_read_from_the_kernels_file(tmp_path) -> None:
    path = tmp_path / "memory"
    path.write_text("some avg10=1.50 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=3\n")
    assert read_pressure(path) == {"some": 1.5, "full": 0.25}
    readings = {reading.name: reading.value for reading in CpuProvider(path).look().devices[0].readings}
    assert readings["memory_full_avg10"] == 0.25


def test_a_kernel_without_pressure_gives_no_reading(tmp_path) -> None:
    readings = {reading.name: reading.value for reading in CpuProvider(tmp_path / "no").look().devices[0].readings}
    assert readings["memory_full_avg10"] is None


@given(st.text(max_size=120))
def test_any_pressure_file_gives_percentages(tmp_path_factory, text: str) -> None:
    path = tmp_path_factory.mktemp("psi") / "memory"
    path.write_text(f"some {text}\nfull avg10={text}\n", encoding="utf-8")
    assert all(0 <= value <= 100 for value in read_pressure(path).values())
