"""A demonstration's own node, as far as it can be tested with a stand-in for `tie up`."""

import sys

from tie.cli.local_node import LocalNode


def test_an_interrupt_while_it_stops_leaves_nothing_behind(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    node = LocalNode()
    look, looks = node.processes, []

    def processes():
        looks.append(True)
        if len(looks) == 1:
            raise KeyboardInterrupt
        return look()

    monkeypatch.setattr(node, "processes", processes)
    assert node.stop() == []
    assert node.process.poll() is not None
    assert not node.run_dir.parent.exists()
