"""What `serve` waits for before it kills the server."""

import os

import pytest

from tie.proto import engine_pb2
from tie.runtime import container, environment
from tie.runtime.control_server import ControlServer


@pytest.mark.parametrize("answers", [[0], [2, 1, 0]])
def test_the_last_events_get_their_moment_whether_or_not_a_drain_had_to_wait(tmp_path, monkeypatch, answers):
    left, slept = list(answers), []

    def handle(request):
        assert request.WhichOneof("kind") == "drain"
        return engine_pb2.EngineReply(status=engine_pb2.EngineStatus(running=left.pop(0)))

    monkeypatch.setenv(environment.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(container.time, "sleep", slept.append)
    server = ControlServer(tmp_path / "engine.sock", handle)
    alive, closing = os.pipe()
    try:
        container._drain(alive)
    finally:
        server.close()
        os.close(alive)
        os.close(closing)
    assert left == []
    assert slept == [container._FLUSH_S]
