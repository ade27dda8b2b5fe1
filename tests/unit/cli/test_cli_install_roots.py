"""Root file systems of the containers: the same each time, with nothing that is not needed, and able to run."""

import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from tie.cli.install import roots, tree
from tie.cli.install.distributions import Source
from tie.daemon.errors import ConfigError

ROOT = Path(__file__).parents[3]
PYTHON = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
SLOW = os.environ.get("TIE_SLOW") == "1"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"needs {PYTHON}: roots are made of the system's own")


@pytest.mark.parametrize("name", list(roots.ROOTS) if SLOW else ["app"])
def test_two_builds_are_one(tmp_path, name):
    first = roots.build(roots.ROOTS[name], tmp_path / "first", PYTHON)
    assert first == roots.build(roots.ROOTS[name], tmp_path / "second", PYTHON)
    archives = [tree.archive(tmp_path / each, tmp_path / f"{each}.tar") for each in ("first", "second")]
    assert archives[0] == archives[1]
    inside = tmp_path / "first"
    programs = {path.name for path in (inside / "usr/bin").iterdir()}
    assert programs == {PYTHON.name, *roots.ROOTS[name].programs}
    assert not list(inside.rglob("__pycache__/test_*")), "nobody's tests are in it"
    for unwanted in ("torch", "transformers", "pip", "setuptools", "tie/cli", "tie/device", "tie/cloudboard"):
        assert not list((inside / "opt/tie/lib").glob(f"*/site-packages/{unwanted}")), unwanted
    for path in inside.rglob("*"):
        assert path.is_symlink() or not path.stat().st_mode & 0o022, "nobody but its owner may write"
    if os.geteuid() == 0:
        script = f"/opt/tie/bin/{roots.ROOTS[name].scripts[0]}"
        done = subprocess.run(
            ["chroot", inside, script, "--help"], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")


def _bound(unit: str) -> str:
    """What a unit has mounted: as systemd reads it, where an empty list of either kind empties both."""
    bound = re.findall(r"(?m)^Bind(?:ReadOnly)?Paths=(.*)$", unit)
    return " ".join(bound[len(bound) - [*reversed(bound), ""].index("") :])


@pytest.mark.parametrize("name", roots.ROOTS)
def test_a_root_has_every_place_that_its_unit_mounts_something_on(name):
    root = roots.ROOTS[name]
    unit = (ROOT / "systemd" / root.unit).read_text()
    text = unit + roots.drop_in(root, PurePosixPath("/opt/tie/roots") / name, unit)
    after = text[text.rindex("BindReadOnlyPaths=\n") :]
    bound = _bound(text)
    assert set(_bound(unit).split()) - set(bound.split()) <= {"/usr", "-/etc/ld.so.cache", "/opt/tie"}, "all but that"
    places = {path.lstrip("-/") for path in bound.split()}
    assert places - {"usr", "etc/ld.so.cache", "opt/tie"} <= set(roots.places(root))
    assert "/usr" not in after.split(), "it sees its own"


def _loader_says(monkeypatch, text: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text, stderr=""))


def test_a_library_that_the_loader_does_not_find_is_an_error(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    _loader_says(monkeypatch, "\tlibfoo.so.1 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x0)\n")
    with pytest.raises(ConfigError, match=r"lacks libfoo\.so\.1"):
        roots._libraries([program], [])
    # One that the environment brings is found where who names it has been loaded.
    own = Source(PurePosixPath("site-packages/foo.libs/libfoo.so.1"), tmp_path / "libfoo.so.1", "")
    assert PurePosixPath("usr/lib/x86_64-linux-gnu/libc.so.6") in roots._libraries([program], [own])
    _loader_says(monkeypatch, f"{program}: /lib/libc.so.6: version `GLIBC_9' not found (required by {program})\n")
    with pytest.raises(ConfigError, match="lacks GLIBC_9"):
        roots._libraries([program], [])


def test_whatever_a_root_takes_from_the_machine_is_in_its_fingerprint(monkeypatch, tmp_path):
    root = roots.ROOTS["app"]
    sources = roots._sources(root, PYTHON)
    taken = roots._of_the_machine(root, sources, PYTHON)
    assert {f"usr/bin/{PYTHON.name}", "usr/lib64/ld-linux-x86-64.so.2"} <= {str(place) for place in taken}
    assert any(place.name == "hashlib.py" for place in taken)
    assert any(place.name.startswith("libcrypto.so") for place in taken), "what only a module of the library names"
    before = roots.fingerprint(root, PYTHON)
    for name in ("hashlib.py", "libm.so.6", PYTHON.name):
        place = next(place for place in taken if place.name == name)
        other = tmp_path / name
        other.write_bytes(b"updated")
        monkeypatch.setattr(roots, "_of_the_machine", lambda *_, changed={**taken, place: other}: changed)
        assert roots.fingerprint(root, PYTHON) != before
