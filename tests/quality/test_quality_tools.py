"""Linters, the type checker and the import contracts, as tests: one command tells whether a change may land."""

import filecmp
import subprocess
from pathlib import Path

from tie.proto.generate import generate


def _passes(*argv: str, cwd: Path) -> None:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, f"{Path(argv[0]).name}:\n{(done.stdout + done.stderr)[-6000:]}"


def test_ruff_finds_nothing(tool, root):
    _passes(tool("ruff"), "check", "--no-cache", ".", cwd=root)


def test_every_file_is_formatted(tool, root):
    _passes(tool("ruff"), "format", "--no-cache", "--check", ".", cwd=root)


def test_types_hold(tool, root):
    # The cache in the tree, when there is one, makes the difference of half a minute.
    _passes(tool("mypy"), cwd=root)


def test_import_contracts_hold(tool, root):
    _passes(tool("lint-imports"), "--no-cache", cwd=root)


def test_generated_stubs_are_those_of_the_proto_files(tmp_path, root):
    generate(tmp_path)
    fresh = {path.name for path in (tmp_path / "tie/proto").iterdir()}
    kept = {path.name for path in (root / "tie/proto").iterdir() if "_pb2" in path.name}
    assert fresh == kept
    different = filecmp.cmpfiles(tmp_path / "tie/proto", root / "tie/proto", sorted(fresh), shallow=False)
    assert different[1:] == ([], []), "run python -m tie.proto.generate"
