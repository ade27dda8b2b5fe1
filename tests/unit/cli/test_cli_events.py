"""`tie events` and `tie gpu`: what an operator reads."""

import itertools

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from controllerd.facts import Facts, Gpu, Owner, Runtime
from controllerd.gates import Memory, assess
from tie.cli.events import sentence, why
from tie.cli.gpu import device_table, value_text
from tie.cli.main import tie
from tie.proto import control_pb2, gpuhealth_pb2


def happening(kind: str, code: str, before: str = "", after: str = "", more: tuple[str, ...] = ()) -> str:
    return sentence(control_pb2.Happening(kind=kind, code=code, before=before, after=after, more=more))


def test_a_night_in_plain_words():
    night = [
        happening("state", "runtime-in-error", "available", "error", ("runtime-in-error", "canary-timeout")),
        happening("recycle", "error", before="0123abcd" * 4, more=("runtime-in-error",)),
        happening("state", "error", "error", "draining"),
        happening("peer", "gone", after="probe"),
        happening("runtime", "seen", "0123abcd" * 4, "4567cdef" * 4),
        happening("recycled", "ok", "0123abcd" * 4, "4567cdef" * 4),
        happening("state", "ready", "recycling", "available"),
        happening("gpu", "xid-79", more=("xid-79", "recovering")),
        happening("given-up", "recycles-in-vain", more=("gpu-unavailable", "xid-79")),
    ]
    assert night == [
        (
            "the node is OUT OF SERVICE: the runtime's probe says that it has failed "
            "(also: test requests got no answer, and the engine computed nothing meanwhile)"
        ),
        "a recycle began, because something had failed (see the lines before); runtime 0123abcd is to go",
        (
            "the node is busy: takes no new requests, lets the running ones finish: "
            "something had failed (see the lines before)"
        ),
        "probe does not answer any more",
        "runtime 4567cdef was seen; before it there was 0123abcd",
        "the recycle is done: runtime 0123abcd is gone, 4567cdef serves",
        "the node is in service: everything is as it should be",
        "gpuhealthd reports: xid-79, recovering",
        (
            "THE NODE GAVE UP: fresh runtimes and a fresh model owner did not help. Somebody is needed: mend what is "
            "named here, then `tie recycle`. Now: gpuhealthd calls the hardware unfit (`tie gpu`), xid 79"
        ),
    ]


def test_every_reason_of_the_gates_is_explained():
    runtimes = [None] + [
        Runtime("a", state == "ready", state, canary, False, "m", "r", 0, 1.0, 1)
        for state, canary in itertools.product(("ready", "initializing", "in-error", "recycling"), (True, False))
    ]
    gpus = [None] + [Gpu(*flags) for flags in itertools.product((True, False), repeat=4)]
    owners = [None] + [Owner("o", 1, state) for state in ("ready", "loading", "failed")]
    memories = [Memory(), Memory(stale_instance="a"), Memory(owner_changed=True, overdue=True)]
    codes = {
        code
        for runtime, gpu, owner, memory in itertools.product(runtimes, gpus, owners, memories)
        for code in assess(Facts(runtime, gpu, owner), memory).reasons
    }
    assert len(codes) >= 17
    assert [code for code in codes if why(code) == code.replace("-", " ")] == []


@given(*[st.text(max_size=20)] * 4, st.lists(st.text(max_size=20), max_size=3))
def test_words_that_this_version_does_not_know_are_shown(kind, code, before, after, more):
    assert isinstance(happening(kind, code, before, after, tuple(more)), str)


@pytest.mark.parametrize(
    ("value", "unit", "measured", "text"),
    [
        (0.0, "celsius", False, "-"),
        (41.0, "celsius", True, "41 °C"),
        (80e9, "bytes", True, "80 GB"),
        (64.0, "mask", True, "0x40"),
        (0.0, "count", True, "0"),
        (1.0, "furlongs", True, "1 furlongs"),
    ],
)
def test_readings(value, unit, measured, text):
    assert value_text(gpuhealth_pb2.Reading(value=value, unit=unit, measured=measured)) == text


def test_a_device_says_what_is_wrong_and_what_would_mend_it():
    device = gpuhealth_pb2.DeviceVerdict(
        id="GPU-1",
        name="Some GPU",
        verdict=gpuhealth_pb2.VERDICT_UNAVAILABLE,
        reasons=["xid-79"],
        action=gpuhealth_pb2.ACTION_REBOOT,
        readings=[
            gpuhealth_pb2.Reading(name="temperature_c", value=40, unit="celsius", measured=True),
            gpuhealth_pb2.Reading(name="sram_threshold"),
        ],
    )
    paper = RichConsole(width=100, record=True, quiet=True)
    paper.print(device_table(device, everything=False))
    paper.quiet = False
    with paper.capture() as shown:
        paper.print(device_table(device, everything=True))
    text = shown.get()
    for word in ("Some GPU", "GPU-1", "unavailable", "xid-79", "reboot the machine", "40 °C", "sram threshold"):
        assert word in text


@pytest.mark.parametrize("command", ["events", "gpu"])
def test_without_a_node_there_is_a_hint(command, tmp_path):
    result = CliRunner().invoke(tie, [command, "--run-dir", str(tmp_path)])
    assert result.exit_code != 0
    assert "no node runs" in str(result.exception)
