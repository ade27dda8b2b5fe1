"""A canary that timed out is late only beside an engine that has computed something since it began."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from status_probe import probe as probes
from status_probe.canary import TIMEOUT, CanaryResult
from tie.proto import engine_pb2
from tie.runtime.control_server import ControlServer

FLIGHT_S = 0.05


@pytest.mark.parametrize(
    ("last_step_age_s", "progress"),
    [(0.0, True), (FLIGHT_S * 0.9, True), (60.0, False)],
    ids=["at work", "ended a step a moment ago", "wedged before it began"],
)
async def test_only_steps_since_the_canary_began_are_progress(tmp_path, monkeypatch, last_step_age_s, progress):
    async def fly(client, token, *, deadline_s):
        began = time.monotonic()
        while time.monotonic() - began < FLIGHT_S:
            await asyncio.sleep(FLIGHT_S)
        return CanaryResult(at=time.monotonic(), latency_s=FLIGHT_S, error=TIMEOUT)

    # More steps than at the probe's last question, whenever that was.
    status = engine_pb2.EngineStatus(instance_id="this", steps=1000, last_step_age_s=last_step_age_s)
    server = ControlServer(tmp_path / "engine.sock", lambda _: engine_pb2.EngineReply(status=status))
    monkeypatch.setattr(probes, "fly", fly)
    config = SimpleNamespace(
        sockets=SimpleNamespace(engine=tmp_path / "engine.sock"), probe=SimpleNamespace(canary_deadline_s=5.0)
    )
    try:
        result = await probes.Probe(config, None, "this", lambda: None)._fly(None, 0)
    finally:
        server.close()
    assert result.progress is progress
    assert result.late is progress
