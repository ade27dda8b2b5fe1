"""What `tie doctor` says of an installation: whether it is whole, and whether everything it writes is volatile."""

from collections.abc import Iterator
from pathlib import Path

from tie.assets import active
from tie.assets.bundle import open_bundle
from tie.cli.checks import Check, Level, filesystem
from tie.cli.install import files, ours, plan
from tie.cli.install.machine import ASSETS, CONFIG, KEYS, PREFIX, RUN, TARGET, Machine
from tie.cli.install.system import names
from tie.daemon import config as node_config
from tie.daemon.errors import ConfigError, TieError

_AGAIN = "tie install, as root: it mends what is missing or different"
_VOLATILE = ("tmpfs", "ramfs")


def installed(machine: Machine) -> Iterator[Check]:
    """Every check of the node that is installed on this machine; none where there is none."""
    systemd = ours.current(machine)
    if systemd is None:
        return
    yield _whole(machine)
    yield _units(machine, systemd)
    yield _accounts(machine, systemd)
    yield _configuration(machine)
    yield _model(machine)
    yield _keys(machine)
    yield volatile(machine)
    if machine.live:
        yield _running(machine)


def _whole(machine: Machine) -> Check:
    place = ours.tree_in_use(machine)
    if not plan.is_whole(machine, place):
        return Check("installation", Level.MISSING, f"{place} is not what was installed", _AGAIN)
    return Check("installation", Level.OK, f"{PREFIX} is {place.name}, unchanged")


def _units(machine: Machine, systemd: Path) -> Check:
    containers = plan.places(ours.tree_in_use(machine), plan.has_containers(machine))
    wanted = files.shipped(systemd, gpu=plan.has_gpu(machine), containers=containers)
    different = [place.name for place, content in wanted.items() if _read(machine.at(place)) != content]
    if different:
        return Check("units", Level.MISSING, f"missing or changed: {', '.join(different)}", _AGAIN)
    return Check("units", Level.OK, f"{len(wanted)} files of systemd")


def _accounts(machine: Machine, systemd: Path) -> Check:
    users, groups = files.accounts(systemd)
    missing = sorted((set(users) | set(groups)) - names(machine))
    if missing:
        return Check("accounts", Level.MISSING, f"missing: {', '.join(missing)}", _AGAIN)
    return Check("accounts", Level.OK, f"{len(users)} users, {len(groups)} groups")


def _configuration(machine: Machine) -> Check:
    try:
        config = node_config.load(machine.at(CONFIG))
    except ConfigError as error:
        return Check("configuration", Level.MISSING, str(error), error.hint)
    if config.run_dir != str(RUN):
        hint = "leave run_dir out of it: the units expect the default"
        return Check("configuration", Level.MISSING, f"{CONFIG}: run_dir is {config.run_dir}", hint)
    return Check("configuration", Level.OK, str(CONFIG))


def _model(machine: Machine) -> Check:
    link = machine.at(ASSETS / active.LINK)
    try:
        manifest = open_bundle(link).manifest
    except TieError as error:
        return Check("model", Level.MISSING, str(error), "tie install --bundle DIRECTORY, or --demo")
    return Check("model", Level.OK, f"{manifest.model} {manifest.release}")


def _keys(machine: Machine) -> Check:
    keys = machine.at(RUN / "keys")
    try:
        # Their folder can be entered but not listed by those who may not read them.
        missing = [name for name in ("binding.key", "statement.key") if not (keys / name).exists()]
    except OSError:
        missing = ["their folder"]
    if missing:
        return Check("keys", Level.MISSING, f"{', '.join(missing)} not there", f"systemctl start {KEYS}")
    return Check("keys", Level.OK, f"in memory: {keys}")


def volatile(machine: Machine) -> Check:
    """Whether everything that a running node writes is gone with the power."""
    places = [RUN, RUN / "keys", RUN / "assets", RUN / "control"]
    kinds = {str(place): filesystem(machine.at(place)) for place in places}
    lasting = {place: kind for place, kind in kinds.items() if kind not in _VOLATILE}
    if lasting:
        found = ", ".join(f"{place} on {kind}" for place, kind in lasting.items())
        return Check("volatile storage", Level.NOTE, found, "keys and journal outlive a boot: mount a tmpfs there")
    return Check("volatile storage", Level.OK, "all that a node writes is in memory")


def _running(machine: Machine) -> Check:
    if machine.is_active(TARGET):
        return Check("node", Level.OK, f"{TARGET} is active: `tie status` says how it is")
    return Check("node", Level.NOTE, f"{TARGET} is not active", f"systemctl start {TARGET}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
