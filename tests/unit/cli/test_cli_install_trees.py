"""What a node's tree is made of, and that the same files make the same tree."""

import base64
import hashlib
import os
import stat
import sys
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

from tie.cli.install import distributions, tree
from tie.cli.install.distributions import Source
from tie.cli.install.machine import PREFIX
from tie.daemon.errors import ConfigError

PYTHON = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")


def test_a_node_gets_what_it_needs_and_nothing_of_the_tests():
    names = {item.name.lower() for item in distributions.closure(["tie-inference[node]"])}
    assert {"grpcio", "tritonclient", "cryptography", "msgspec", "supervisor", "numpy", "packaging"} <= names
    assert not names & {"pytest", "mypy", "ruff", "torch", "transformers", "hypothesis", "grpcio-tools"}


def test_what_is_not_installed_is_named():
    with pytest.raises(ConfigError, match="no-such-distribution"):
        distributions.closure(["no-such-distribution"])


def test_another_version_than_the_locked_one_is_refused(tmp_path):
    lock = tmp_path / "requirements.lock"
    lock.write_text("click==0.0.1\n")
    with pytest.raises(ConfigError, match=r"click .* \(locked: 0\.0\.1\)"):
        distributions.check_lock([metadata.distribution("click")], lock)


def _distribution(folder: Path, *records: str) -> metadata.Distribution:
    info = folder / "thing-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
    (info / "RECORD").write_text("".join(f"{line}\n" for line in records))
    return metadata.Distribution.at(info)


def test_a_file_that_was_changed_since_pip_installed_it_is_refused(tmp_path):
    content = b"x = 1\n"
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    (tmp_path / "thing.py").write_bytes(content)
    made = _distribution(tmp_path, f"thing.py,sha256={digest},6", "__pycache__/thing.pyc,,", "../../../bin/thing,,")
    (source,) = distributions.sources(made)
    assert source.path == PurePosixPath("site-packages/thing.py")
    assert distributions.read(source) == content
    (tmp_path / "thing.py").write_bytes(b"x = 2\n")
    with pytest.raises(ConfigError, match="has been changed"):
        distributions.read(source)


def _lay(folder: Path, sources: list[Source]) -> str:
    tree.build(folder, sources, {"one": "one:is_kind"}, records={}, prefix=PREFIX, python=PYTHON)
    tree.compile_bytecode(folder, PREFIX)
    return tree.settle(folder)


def test_the_same_files_give_the_same_tree_and_the_same_archive_to_the_bit(tmp_path, sources):
    first = _lay(tmp_path / "first", sources)
    old = os.umask(0o077)
    try:
        second = _lay(tmp_path / "second", sources[::-1])
    finally:
        os.umask(old)
    assert first == second
    archives = [tree.archive(tmp_path / name, tmp_path / f"{name}.tar") for name in ("first", "second")]
    assert archives[0] == archives[1]
    assert list((tmp_path / "first").rglob("*.pyc"))


@pytest.mark.parametrize("change", ["content", "mode", "name", "link"])
def test_whatever_changes_in_a_tree_changes_its_hash(tmp_path, sources, change):
    folder = tmp_path / "tree"
    before = _lay(folder, sources)
    module = next(folder.rglob("one.py"))
    match change:
        case "content":
            module.write_text(module.read_text() + "#")
        case "mode":
            module.chmod(0o755)
        case "name":
            module.rename(module.with_name("two.py"))
        case "link":
            (folder / "bin/python").unlink()
            (folder / "bin/python").symlink_to("/usr/bin/true")
    assert tree.digest(folder) != before


def test_a_tree_is_laid_out_as_an_environment_that_nobody_can_write(tmp_path, sources):
    folder = tmp_path / "tree"
    _lay(folder, sources)
    assert (folder / "bin/one").read_text().startswith(f"#!{PREFIX}/bin/python -P\n")
    assert (folder / "bin/python").readlink() == PYTHON
    for path in folder.rglob("*"):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) in (0o644, 0o755)
            assert path.stat().st_mtime == tree.EPOCH


def test_what_cannot_be_read_leaves_no_tree(tmp_path, sources):
    missing = Source(PurePosixPath("site-packages/gone.py"), tmp_path / "gone.py", "")
    with pytest.raises(ConfigError, match="cannot read"):
        _lay(tmp_path / "tree", [*sources, missing])
    assert not (tmp_path / "tree").exists()
