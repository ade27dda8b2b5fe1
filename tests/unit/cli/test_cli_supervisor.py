"""Daemons under `tie up`: readiness, restart, refusal of a configuration, stop."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tie.cli import supervisor
from tie.cli.supervisor import Report, Service, ServiceConfigError, describe_exit

DEADLINE = 20.0
NOTIFY = "import os, sys, time\nfrom tie.daemon.notify import notify\n"


class Recorder:
    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()

    @property
    def report(self) -> Report:
        put = self.events.put_nowait
        return Report(
            line=lambda line: put(("line", line)),
            ready=lambda: put(("ready",)),
            status=lambda text: put(("status", text)),
            ended=lambda code, pause: put(("ended", code, pause)),
        )


@contextlib.asynccontextmanager
async def running(program: str) -> AsyncIterator[tuple[Service, Recorder, asyncio.Task[None]]]:
    recorder = Recorder()
    service = Service("thing", [sys.executable, "-c", NOTIFY + program], 5.0)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        task = asyncio.create_task(service.run(dict(os.environ), Path(folder), recorder.report))
        try:
            async with asyncio.timeout(DEADLINE):
                yield service, recorder, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_readiness_and_status_come_through() -> None:
    async with running("notify('READY=1', 'STATUS=available since now', 'X=1'); time.sleep(99)") as (
        _,
        recorder,
        _task,
    ):
        assert await recorder.events.get() == ("ready",)
        assert await recorder.events.get() == ("status", "available since now")


async def test_it_is_started_again_with_growing_pauses() -> None:
    async with running("sys.exit(4)") as (service, recorder, _task):
        seen = [await recorder.events.get() for _ in range(3)]
        assert seen == [("ended", 4, 0.1), ("ended", 4, 0.2), ("ended", 4, 0.4)]
        assert service.starts >= 3


async def test_one_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_WATCHDOG_S", 0.6)
    async with running("notify('WATCHDOG=1'); time.sleep(99)") as (service, recorder, _task):
        assert [await recorder.events.get() for _ in range(2)] == [("ended", -9, 0.1), ("ended", -9, 0.2)]
        assert service.starts == 2


async def test_one_that_never_promised_to_beat_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = supervisor._NotifySocket.silence_s
    looks: asyncio.Queue[float] = asyncio.Queue()

    def noted(socket: supervisor._NotifySocket) -> float:
        silence = measure(socket)
        looks.put_nowait(silence)
        return silence

    monkeypatch.setattr(supervisor, "_WATCHDOG_S", 0.2)
    monkeypatch.setattr(supervisor._NotifySocket, "silence_s", noted)
    async with running("time.sleep(99)") as (service, recorder, _task):
        for _ in range(20):  # six looks for each time that would be too long
            await looks.get()
        assert recorder.events.empty()
        assert service.child is not None
        assert service.child.running


async def test_a_refused_configuration_is_final() -> None:
    async with running("print('wrong key'); sys.exit(78)") as (service, _, task):
        with pytest.raises(ServiceConfigError, match="thing refuses"):
            await task
        assert list(service.last_lines) == ["wrong key"]


async def test_cancelling_stops_the_process() -> None:
    async with running("notify('READY=1'); time.sleep(99)") as (service, recorder, task):
        assert await recorder.events.get() == ("ready",)
        assert service.child is not None
        pid = service.child.pid
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not Path(f"/proc/{pid}").exists()


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "SIGKILL"
    assert describe_exit(-99) == "signal 99"
