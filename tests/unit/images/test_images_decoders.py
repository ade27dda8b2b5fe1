"""Images in a process that may die of them: nobody else's image does, and every end has its own name."""

import os
import signal
import subprocess
import sys
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest

from image_corpus import cases, photograph, saved
from tie.runtime.images import decoders as module
from tie.runtime.images.decoders import Decoders, DecodersBusyError
from tie.runtime.images.decoding import decode
from tie.runtime.images.limits import Limits
from tie.runtime.images.orders import Preparation
from tie.runtime.images.preparing import prepare
from tie.runtime.images.refusals import ImageRefusedError, Refusal
from waiting import wait_for

HOW = Preparation("tiles", 64, 256, True, 1)
SMALL = saved(photograph(64, 48), "JPEG")
WAIT_S = 60


@pytest.fixture(scope="module")
def large():
    """Some seconds of work in the progressive kind."""
    return saved(np.tile(photograph(600, 600), (6, 6, 1)), "JPEG", progressive=True, quality=90)


@pytest.fixture
def make():
    made = []

    def one(limits=None, **options):
        made.append(Decoders(limits or Limits(), HOW, **options))
        return made[-1]

    yield one
    for decoders in made:
        decoders.close()


def refusal(future) -> Refusal:
    with pytest.raises(ImageRefusedError) as caught:
        future.result(WAIT_S)
    return caught.value.refusal


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def busy_child(decoders) -> int:
    """The fork that decodes now."""
    process = decoders._processes[0].helper
    wait_for(lambda: process._process is not None and children(process._process.pid))
    return children(process._process.pid)[0]


def test_pixels_are_those_of_the_decoder_and_a_refusal_is_its(make):
    decoders = make()
    some = [case for number, case in enumerate(cases()) if number % 25 == 0]
    futures = [decoders.decode(case.data) for case in some]
    for case, future in zip(some, futures, strict=True):
        if case.refusal:
            assert refusal(future) is case.refusal
        else:
            wanted = prepare(decode(case.data, Limits()), HOW)
            got = future.result(WAIT_S)
            assert np.array_equal(got.tiles, wanted.tiles), case.name
            assert (got.rows, got.columns) == (wanted.rows, wanted.columns)


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
def test_a_decoder_that_crashes_costs_its_own_image_alone(make, large, how):
    decoders = make(workers=1)
    doomed = decoders.decode(large)
    behind = decoders.decode(SMALL)
    os.kill(busy_child(decoders), how)
    assert refusal(doomed) is Refusal.DECODER_DIED
    assert len(behind.result(WAIT_S).tiles) == 13


def test_the_process_itself_is_started_again(make, large):
    decoders = make(workers=1)
    assert decoders.decode(SMALL).result(WAIT_S)
    process = decoders._processes[0].helper._process
    process.kill()
    process.wait(WAIT_S)
    assert decoders.decode(SMALL).result(WAIT_S)
    doomed = decoders.decode(large)
    busy_child(decoders)
    decoders._processes[0].helper._process.kill()
    with pytest.raises(DecodersBusyError):
        doomed.result(WAIT_S)
    assert decoders.decode(SMALL).result(WAIT_S)


@pytest.mark.parametrize("limits", [Limits(cpu_s=0.05), Limits(wall_s=0.05)])
def test_what_takes_too_long_is_ended_by_the_kernel(make, large, limits):
    decoders = make(limits, workers=1)
    assert refusal(decoders.decode(large)) is Refusal.TOO_SLOW


def test_memory_beyond_the_bound_is_not_to_be_had(make, large):
    decoders = make(Limits(memory_bytes=24 * 1024 * 1024), workers=1)
    assert refusal(decoders.decode(large)) in {Refusal.DECODER_DIED, Refusal.TOO_MANY_PIXELS, Refusal.CORRUPT}
    assert decoders.decode(SMALL).result(WAIT_S)


def test_a_fork_has_no_descriptor_but_its_own_and_gets_no_other(make, large):
    decoders = make(workers=1)
    future = decoders.decode(large)
    child = busy_child(decoders)
    bounds = Path(f"/proc/{child}/limits")
    wait_for(lambda: "Max open files            0 " in bounds.read_text())
    assert [path.name for path in Path(f"/proc/{child}/fd").iterdir()] == ["0"]
    assert "Max file size             0 " in bounds.read_text()
    os.kill(child, signal.SIGKILL)
    wait([future], WAIT_S)


def test_more_than_can_wait_are_told_to_try_again(make, large, monkeypatch):
    monkeypatch.setattr(module, "_MOST_WAITING", 1)
    decoders = make(workers=1)
    running, waiting = decoders.decode(large), decoders.decode(SMALL)
    with pytest.raises(DecodersBusyError):
        decoders.decode(SMALL).result(0)
    os.kill(busy_child(decoders), signal.SIGKILL)
    wait([running, waiting], WAIT_S)
    assert decoders.decode(SMALL).result(WAIT_S)


def test_what_is_too_large_never_reaches_a_process(make):
    decoders = make(Limits(file_bytes=100))
    assert refusal(decoders.decode(SMALL)) is Refusal.FILE_TOO_LARGE


LIES = {
    "nothing": b"",
    "a refusal that is none": module.REPLY.pack(99, 0, 0, 0),
    "no pixels": module.REPLY.pack(0, 2, 2, 5),
    "more than there can be": module.REPLY.pack(0, 100, 100, 10_001) + bytes(64 * 64 * 3),
    "another number than rows and columns make": module.REPLY.pack(0, 1, 2, 2) + bytes(2 * 64 * 64 * 3),
    "none": module.REPLY.pack(0, 0, 0, 0),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_decoder_in_other_hands_is_not_believed(make, lie, monkeypatch):
    """One that says something else to the runtime than its program would."""
    source = f"import tie.runtime.images.decoder_process as p\np._answer = lambda *_: {LIES[lie]!r}\np.main()"
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: real([*command[:2], "-c", source], **rest))
    decoders = make(workers=1)
    assert refusal(decoders.decode(SMALL)) is Refusal.DECODER_DIED


def test_a_runtime_without_images_needs_no_decoder():
    """Nor is there one in a root file system that was made for it."""
    code = "import sys, tie.runtime.service as _; print({'PIL', 'kornia_rs', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.strip() == "set()"
