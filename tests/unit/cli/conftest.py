"""What several tests of the command line need."""

from pathlib import PurePosixPath

import pytest

from tie.cli.install.distributions import Source


@pytest.fixture
def sources(tmp_path) -> list[Source]:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "one.py").write_text("KINDS = {'a', 'b', 'c', 'd'}\n\ndef is_kind(x):\n    return x in {'e', 'f', 'g'}\n")
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o700)
    return [
        Source(PurePosixPath("site-packages/one.py"), folder / "one.py", ""),
        Source(PurePosixPath("share/tie/tool"), folder / "tool", ""),
    ]
