"""The end of a node: nothing outlives `tie up`, however it ends."""

import asyncio
import time

import pytest

from tie.cli.local_node import LocalNode
from tie.proto import control_pb2

pytestmark = [pytest.mark.node, pytest.mark.chaos]


def test_nothing_outlives_a_killed_tie_up(bundle):
    node = LocalNode(bundle=bundle)
    try:
        asyncio.run(node.wait_for(control_pb2.STATE_AVAILABLE, 180))
        assert len(node.processes()) > 8
        node.process.kill()
        node.process.wait()
        deadline = time.monotonic() + 15
        while node.leftovers() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [process.cmdline() for process in node.leftovers()] == []
    finally:
        node.stop()
