"""What belongs to somebody else is neither replaced by an installation nor removed by an uninstallation."""

from pathlib import Path, PurePosixPath

import pytest

from tie.cli import settings
from tie.cli.install import distributions, files, ours, removal
from tie.cli.install.machine import COMMAND, CONFIG, PREFIX, RUN, STATE, TREES, UNITS, Machine
from tie.cli.install.steps import Link, WriteFiles, carry_out
from tie.daemon.errors import ConfigError

SYSTEMD = distributions.shared("systemd")
UNIT = UNITS / "tie.target"


def _quietly(text: str) -> None:
    del text


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def installed(machine) -> Machine:
    """As much of an installation as is looked at here."""
    tree = TREES / "1/tree"
    machine.at(tree / distributions.SHARE).mkdir(parents=True)
    (machine.at(tree / distributions.SHARE) / "systemd").symlink_to(SYSTEMD)
    contents = files.shipped(SYSTEMD, gpu=False)
    links = [Link(machine, "", PREFIX, tree), Link(machine, "", COMMAND, PREFIX / "bin/tie")]
    # The link of an image leads into the image; here it has to be found from outside.
    carry_out([WriteFiles(machine, "", {**contents, CONFIG: (SYSTEMD / "node.toml").read_bytes()}), *links], _quietly)
    return machine


def wanted() -> dict[PurePosixPath, bytes]:
    return files.shipped(SYSTEMD, gpu=False)


def uninstall(machine: Machine, *, purge: bool = False) -> list[str]:
    """Removes everything that is ours; what is said of it."""
    steps = [step for step in removal.steps(machine, purge=purge) if "not start with" not in step.says]
    for step in steps:
        step.do()
    return [step.says for step in steps]


def put(machine: Machine, place: PurePosixPath, text: str = "somebody else's") -> Path:
    path = machine.at(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_of_ours_that_was_changed_is_mended_one_of_others_is_in_the_way(installed, tmp_path):
    put(installed, UNIT, "changed")
    assert ours.in_the_way(installed, wanted()) == []
    other = Machine(tmp_path / "other")
    put(other, UNIT)
    assert ours.in_the_way(other, wanted()) == [UNIT]
    put(other, UNIT, wanted()[UNIT].decode())
    assert ours.in_the_way(other, wanted()) == [], "what we would write is no reason to refuse"


@pytest.mark.parametrize("place", [PREFIX, COMMAND])
@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling"])
def test_what_is_somebody_elses_is_in_the_way_and_outlives_an_uninstallation(machine, place, kind):
    path = machine.at(place)
    path.parent.mkdir(parents=True)
    match kind:
        case "file":
            path.write_text("x")
        case "folder":
            (path / "bin").mkdir(parents=True)
        case "link":
            path.symlink_to(machine.root)
        case "dangling":
            path.symlink_to("/srv/tie")
    assert ours.in_the_way(machine, {}) == [place]
    assert place in removal.kept(machine, purge=True)
    assert uninstall(machine, purge=True) == []
    assert path.is_symlink() or path.exists()


def test_a_step_never_makes_a_link_of_a_file(machine):
    path = put(machine, COMMAND)
    with pytest.raises(ConfigError, match="not a link"):
        carry_out([Link(machine, "", COMMAND, PREFIX)], _quietly)
    assert path.read_text() == "somebody else's"


def test_an_uninstallation_leaves_what_was_changed_and_says_so(installed):
    path = put(installed, UNIT, "changed")
    assert removal.kept(installed, purge=False) == [UNIT]
    assert f"remove {len(wanted()) - 1} files of systemd" in uninstall(installed)
    assert path.read_text() == "changed"
    assert not installed.at(UNITS / "tie.slice").exists()
    assert not installed.at(PREFIX).is_symlink()
    assert not installed.at(TREES).exists()
    assert uninstall(installed) == []


@pytest.mark.parametrize("purge", [False, True])
def test_a_run_directory_goes_with_its_installation(installed, purge):
    installed.at(RUN / "keys").mkdir(parents=True)
    installed.at(RUN / "node.toml").symlink_to(installed.at(CONFIG))  # as systemd-tmpfiles makes it
    assert RUN not in removal.kept(installed, purge=purge)
    assert f"remove {RUN}" in uninstall(installed, purge=purge)
    assert not installed.at(RUN).exists()


@pytest.mark.parametrize("purge", [False, True])
def test_the_run_directory_of_a_node_in_a_terminal_is_not_the_installations(installed, purge):
    lock = put(installed, RUN / settings.UP_LOCK, "4711")
    assert RUN in removal.kept(installed, purge=purge)
    assert uninstall(installed, purge=purge)
    assert lock.exists()
    assert RUN in removal.kept(installed, purge=purge)  # and when nothing is installed any more
    assert uninstall(installed, purge=purge) == []
    assert lock.exists()


def test_a_purge_takes_what_was_changed_too(installed):
    put(installed, UNIT, "changed")
    assert removal.kept(installed, purge=True) == []
    uninstall(installed, purge=True)
    assert not installed.at(UNIT).exists()


def test_where_nothing_is_installed_nothing_goes(machine):
    """A node of `tie up` may be in that run directory, and the files may be of an installation by hand."""
    for place in (UNIT, CONFIG, RUN / "node.toml", STATE / "assets/mine"):
        put(machine, place)
    assert uninstall(machine) == []
    assert uninstall(machine, purge=False) == []
    assert set(removal.kept(machine, purge=False)) == {UNIT, CONFIG, RUN, STATE / "assets"}
