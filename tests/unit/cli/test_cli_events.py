"""`tie events` and `tie gpu`: what an operator reads."""

import inspect
import itertools
import re

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from controllerd.clock import boottime
from controllerd.facts import Facts, Gpu, Owner, Runtime
from controllerd.gates import Memory, assess
from controllerd.happening import Happening
from controllerd.journal import NAME, Journal
from tie.cli.gpu import device_table, value_text
from tie.cli.main import tie
from tie.cli.reasons import WORDS
from tie.cli.sentences import sentence
from tie.daemon.config import NodeConfig, dump
from tie.daemon.sockets import Sockets
from tie.proto import control_pb2, gpuhealth_pb2


def happening(
    kind: str, code: str, before: str = "", after: str = "", more: tuple[str, ...] = (), **fields: object
) -> str:
    return sentence(control_pb2.Happening(kind=kind, code=code, before=before, after=after, more=more, **fields))


OLD, NEW = "0123abcd" * 4, "4567cdef" * 4
NIGHT = [
    (
        happening("state", "runtime-in-error", "available", "error", ("runtime-in-error", "canary-timeout"), count=2),
        (
            "the node is OUT OF SERVICE: the runtime's probe says that it has failed (also: test requests got no "
            "answer, and the engine computed nothing meanwhile); 2 requests under way may have failed, told to the "
            "user. "
            "Nothing to do: it returns by itself, or says that it gives up."
        ),
    ),
    (
        happening("recycle", "error", before=OLD, more=("runtime-in-error",), seconds=30.0),
        (
            "a recycle began, because something had failed (see the lines before); runtime 0123abcd is to go; "
            "running requests get 30 s"
        ),
    ),
    (
        happening("recycle", "operator", before=OLD, seconds=0.001, word="kernel update, Ann"),
        (
            "a recycle began, because an operator asked for it; runtime 0123abcd is to go; running requests are cut "
            '("kernel update, Ann")'
        ),
    ),
    (
        happening("state", "error", "error", "draining"),
        "the node is busy, and takes no new requests: something had failed (see the lines before)",
    ),
    (
        happening("cut", "deadline", count=1),
        ("1 request had not ended when the time was up: its answer was cut, and the user told. Nothing to do."),
    ),
    (
        happening("peer", "gone", after="probe", times=12, first_wall_s=0.0),
        "the runtime's container has ended: its connection broke (12 times since ",
    ),
    (
        happening("peer", "left", after="probe"),
        "the runtime's container has ended, as it was to",
    ),
    (
        happening("peer", "silent", after="owner"),
        (
            "the model owner, which holds the weights, is silent: it hangs, or was stopped. "
            "Nothing to do: it is started again by itself."
        ),
    ),
    (
        happening("peer", "anew", after="store"),
        (
            "the cache store has begun anew: cached conversations are gone, and their next turns are computed in full. "
            "Nothing to do."
        ),
    ),
    (
        happening("runtime", "seen", OLD, NEW),
        "runtime 4567cdef was seen; before it there was 0123abcd",
    ),
    (
        happening("settling", "hold", seconds=30.0),
        "all parts are well; the node is back in service in 30 s if they stay so. Nothing to do.",
    ),
    (
        happening("recycled", "ok", OLD, NEW, seconds=4.0),
        "the recycle is done after 4.0 s: runtime 0123abcd is gone, 4567cdef serves. Nothing to do.",
    ),
    (
        happening("state", "ready", "recycling", "available"),
        "the node is in service: everything is as it should be",
    ),
    (
        happening("gpu", "xid-79", more=("xid-79", "probe-gone")),
        (
            "gpuhealthd reports: xid-79; gpuhealthd's prober has ended, and is started again. "
            "`tie gpu` says what would mend it."
        ),
    ),
    (
        happening("state", "gpu-unavailable", "available", "error", ("gpu-unavailable", "probe-gone")),
        (
            "the node is OUT OF SERVICE: gpuhealthd calls the hardware unfit (also: gpuhealthd's prober has ended, and "
            "is started again). Nothing to do: it returns by itself, or says that it gives up."
        ),
    ),
    (
        happening("gpu", "recovering", more=("recovering", "xid-79")),
        (
            "gpuhealthd reports: it is well again, and has to stay so for a while; xid-79. "
            "`tie gpu` says what would mend it."
        ),
    ),
    (
        happening("keys", "silent"),
        (
            "the key service (tie-kps) does not answer: no request can be opened, users are told to try again. "
            "Nothing to do: a watchdog ends it, and it is started again."
        ),
    ),
    (
        happening("maintenance", "on", before="maintenance", word="disk swap, Ann"),
        'an operator switched maintenance on ("disk swap, Ann"). `tie maintenance off` ends it.',
    ),
    (
        happening("state", "maintenance", "recycling", "maintenance", ("maintenance",)),
        "the node is in maintenance, and holds nothing private any more. `tie maintenance off` ends it.",
    ),
    (
        happening("maintenance", "on", before="asset"),
        "`tie assets activate` withdraws the node. `tie maintenance off` ends it, should it not end by itself.",
    ),
    (
        happening("controller", "stood-still", seconds=10.0),
        (
            "the controller itself stood still for 10 s (it, or the machine, was stopped); it looks anew now. "
            "Nothing to do."
        ),
    ),
    (
        happening("controller", "began-anew"),
        "the controller had died, and began anew; meanwhile the node took no requests. Nothing to do.",
    ),
    (
        happening("disk", "full"),
        (
            "the run directory's disk is full: daemons that start there may fail, and events may be lost. "
            "Make room there (`df`)."
        ),
    ),
    (
        happening("given-up", "recycles-in-vain", more=("gpu-unavailable", "xid-79")),
        (
            "THE NODE GAVE UP: fresh runtimes and a fresh model owner did not help. Now: gpuhealthd calls the hardware "
            "unfit, xid 79. Somebody is needed: mend what is named here, then `tie recycle`."
        ),
    ),
]


@pytest.mark.parametrize(("told", "expected"), NIGHT)
def test_a_night_in_plain_words(told: str, expected: str):
    assert told.startswith(expected)
    assert told == expected or expected.endswith("since ")


def test_every_kind_of_happening_has_a_sentence():
    kinds = set(re.findall(r'^- "([a-z-]+)"', inspect.getdoc(Happening) or "", re.MULTILINE))
    assert len(kinds) >= 16
    unsaid = [kind for kind in kinds if happening(kind, "some-code").startswith(f"{kind} some-code")]
    assert not unsaid


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
    assert codes <= WORDS.keys()


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


def test_events_are_read_although_no_controller_answers(tmp_path):
    (tmp_path / "node.toml").write_bytes(dump(NodeConfig(run_dir=str(tmp_path))))
    run = CliRunner().invoke(tie, ["events", "--run-dir", str(tmp_path)])
    assert "no controller answers" in str(run.exception)
    (tmp_path / "control").mkdir()
    journal = Journal(Sockets(tmp_path).control.with_name(NAME), boottime)
    journal.add(Happening("maintenance", "on", before="maintenance", word="disk swap, Ann"))
    run = CliRunner().invoke(tie, ["events", "--run-dir", str(tmp_path)])
    assert run.exit_code == 0
    assert "left behind" in run.output
    assert "disk swap, Ann" in run.output


@pytest.mark.parametrize("command", ["events", "gpu"])
def test_without_a_node_there_is_a_hint(command, tmp_path):
    result = CliRunner().invoke(tie, [command, "--run-dir", str(tmp_path)])
    assert result.exit_code != 0
    assert "no node runs" in str(result.exception)
