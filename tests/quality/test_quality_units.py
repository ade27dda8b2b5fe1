"""The units: correct, tight, and in step with the configuration's sockets and with one another."""

import re
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path, PurePosixPath

import pytest

from tie.cli.install.roots import ROOTS, drop_in
from tie.daemon.config import NodeConfig, load
from tie.daemon.sockets import Sockets

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "systemd"
SERVICES = sorted(path.name for path in SYSTEMD.glob("*.service"))
DROPINS = sorted(path.stem for path in (SYSTEMD / "gpu").glob("*.conf"))

# Exposure that each unit may have, as systemd-analyze counts it (lower is tighter).
EXPOSURE = defaultdict(lambda: 0.5, {"tie-cloud-app@.service": 0.2, "tie-cloudboard.service": 1.0})
GPU_EXPOSURE = 1.5

# What every unit sets. `allowed` lists the units that may differ, each with a comment in the unit and a line in
# docs/units.md.
REQUIRED = {
    "NoNewPrivileges": "yes", "CapabilityBoundingSet": "", "AmbientCapabilities": "", "PrivateUsers": "yes",
    "PrivateNetwork": "yes", "PrivateIPC": "yes", "PrivateDevices": "yes", "PrivateTmp": "yes", "PrivateMounts": "yes",
    "ProtectSystem": "strict", "ProtectHome": "yes", "ProtectProc": "invisible", "ProcSubset": "pid",
    "ProtectClock": "yes", "ProtectControlGroups": "yes", "ProtectHostname": "yes", "ProtectKernelLogs": "yes",
    "ProtectKernelModules": "yes", "ProtectKernelTunables": "yes", "RestrictNamespaces": "yes",
    "RestrictRealtime": "yes", "RestrictSUIDSGID": "yes", "RestrictAddressFamilies": "AF_UNIX", "IPAddressDeny": "any",
    "LockPersonality": "yes", "MemoryDenyWriteExecute": "yes", "SystemCallArchitectures": "native", "UMask": "0077",
    "RootDirectory": "/run/tie/root", "MountAPIVFS": "yes", "ReadOnlyPaths": "+/run", "KeyringMode": "private",
    "LimitCORE": "0", "CoredumpFilter": "0", "MemorySwapMax": "0", "UnsetEnvironment": "TIE_DUMPABLE",
}  # fmt: skip
ALLOWED = {
    ("tie-cloudboard.service", "PrivateNetwork"), ("tie-cloudboard.service", "RestrictAddressFamilies"),
    ("tie-afm-runtime.service", "MemoryDenyWriteExecute"), ("tie-afm-runtime.service", "ProcSubset"),
    ("gpuhealthd.service", "ProcSubset"), ("tie-model-owner.service", "ProcSubset"),
    ("tie-model-owner.service", "PrivateUsers"), ("tie-keys.service", "PrivateUsers"),
}  # fmt: skip
READS_KEYS = {
    "tie-kps.service": {"keys/statement.key", "keys/binding.pub"},
    "cb_jobhelper@.service": {"keys/binding.key"},
    "tie-cloudboard.service": {"keys/statement.pub"},
}


def _settings(text: str) -> dict[str, list[str]]:
    """Every assignment of a unit, by key, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in text.splitlines():
        if "=" in line and not line.startswith(("#", ";", "[")):
            key, value = line.split("=", 1)
            found[key].append(value)
    return found


def _service(name: str) -> dict[str, list[str]]:
    return _settings((SYSTEMD / name).read_text())


def _edges(name: str, *keys: str) -> set[str]:
    """The directories below /run/tie that a unit names under `keys`."""
    words = " ".join(" ".join(_service(name).get(key, [])) for key in keys).split()
    return {word.lstrip("-+").removeprefix("/run/tie/") for word in words if "/run/tie/" in word}


def _root(name: str) -> str:
    """The drop-in that gives a unit a root of its own."""
    text = (SYSTEMD / ROOTS[name].unit).read_text()
    return drop_in(ROOTS[name], PurePosixPath("/opt/tie/roots") / name, text)


def test_there_are_no_warnings(tool, units, tmp_path):
    for unit in units:
        text = unit.read_text()
        (tmp_path / unit.name).write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))
    for name in DROPINS:
        text = (tmp_path / f"{name}.service").read_text() + (SYSTEMD / "gpu" / f"{name}.conf").read_text()
        (tmp_path / f"{name}-gpu.service").write_text(text)
    for name in ROOTS:
        text = (tmp_path / ROOTS[name].unit).read_text()
        (tmp_path / ROOTS[name].unit.replace(".service", "-root.service").replace("@-root", "-root@")).write_text(
            text + _root(name)
        )
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", "--man=no", *sorted(tmp_path.iterdir())],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def _exposure(program: str, unit: Path) -> float:
    done = subprocess.run(
        [program, "security", "--offline=true", "--no-pager", unit],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stderr
    assert done.stderr == ""
    return float(found[1])


@pytest.mark.parametrize("name", SERVICES)
def test_exposure_stays_below_its_limit(tool, name):
    assert _exposure(tool("systemd-analyze"), SYSTEMD / name) <= EXPOSURE[name]


@pytest.mark.parametrize("name", DROPINS)
def test_exposure_with_a_gpu_stays_below_its_limit(tool, name, tmp_path):
    unit = tmp_path / f"{name}.service"
    unit.write_text((SYSTEMD / unit.name).read_text() + (SYSTEMD / "gpu" / f"{name}.conf").read_text())
    assert _exposure(tool("systemd-analyze"), unit) <= GPU_EXPOSURE


@pytest.mark.parametrize("name", ROOTS)
def test_exposure_with_a_root_of_its_own_stays_below_its_limit(tool, name, tmp_path):
    unit = tmp_path / ROOTS[name].unit
    unit.write_text((SYSTEMD / unit.name).read_text() + _root(name))
    assert _exposure(tool("systemd-analyze"), unit) <= EXPOSURE[unit.name]


@pytest.mark.parametrize("name", SERVICES)
def test_every_unit_has_the_whole_sandbox(name):
    settings = _service(name)
    different = {key for key, value in REQUIRED.items() if settings.get(key, [None])[-1] != value}
    assert {(name, key) for key in different} == {pair for pair in ALLOWED if pair[0] == name}
    assert settings["SystemCallFilter"], "a filter of system calls"
    assert settings["TasksMax"], "limits of tasks, by cgroup …"
    assert settings["LimitNPROC"], "… and by rlimit"
    assert settings["LimitDATA"]
    assert any("/dev/shm" in value for value in settings["TemporaryFileSystem"]), "PrivateDevices= binds the host's"
    if settings["Type"] == ["notify"]:
        assert settings["WatchdogSignal"] == ["SIGKILL"], "the default asks for a core"


@pytest.mark.parametrize("name", [name for name in SERVICES if "@" in name])
def test_each_instance_has_a_uid_of_its_own_with_a_name_that_fits(name):
    settings = _service(name)
    assert settings["DynamicUser"] == ["yes"]
    (user,) = settings["User"]
    assert user.endswith("%i"), "without the instance's name all instances share one uid"
    # COUNTER-PID-UID of the connection, each as long as it can get; a user's name has at most 31 characters.
    assert len(user.replace("%i", f"{2**32 - 1}-{2**22}-65534")) <= 31
    assert settings["CollectMode"] == ["inactive-or-failed"]


@pytest.mark.parametrize("name", [name for name in SERVICES if "@" not in name and name != "tie-keys.service"])
def test_daemons_come_back_whatever_their_exit_status(name):
    settings = _service(name)
    assert settings["Restart"] == ["always"], "supervisord exits 0 at every recycle"
    assert settings["StartLimitIntervalSec"] == ["0"]
    assert settings["RestartPreventExitStatus"] == ["78"]
    assert settings["PartOf"] == ["tie.target"]


@pytest.mark.parametrize("name", [path.name for path in SYSTEMD.glob("*.socket")])
def test_limits_of_accepting_sockets_are_chosen(name):
    settings = _service(name)
    assert settings["Accept"] == ["yes"]
    config = NodeConfig().cloudboard
    assert int(settings["MaxConnections"][0]) > config.max_in_flight + 64, (
        "64 is the most that cloudboard.standby allows"
    )
    assert settings["TriggerLimitIntervalSec"] == ["0"], "the default closes the socket for good"
    assert settings["SocketMode"] == ["0660"]


def test_units_start_our_console_scripts(root):
    scripts = set(tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"])
    started = {_service(name)["ExecStart"][0] for name in SERVICES}
    expected = {f"/opt/tie/bin/{name} --config /etc/tie/node.toml" for name in scripts - {"tie-keys"}}
    started.remove(_service("tie-keys.service")["ExecStart"][0])  # it says as well who reads which key
    assert started <= expected
    # The probe runs inside the runtime's container; `tie` is a person's.
    assert {line.split()[0].rsplit("/", 1)[1] for line in expected - started} == {"tie", "tie-status-probe"}


def _sockets() -> dict[str, Path]:
    paths = NodeConfig().sockets
    return {name: getattr(paths, name) for name, value in vars(Sockets).items() if isinstance(value, property)}


def test_tmpfiles_makes_one_directory_and_sysusers_one_group_for_each_edge():
    lines = [line.split() for line in (SYSTEMD / "tmpfiles.d/tie.conf").read_text().splitlines()]
    made = {words[1]: words[2:5] for words in lines if words and words[0] == "d"}
    users = {words[1] for line in (SYSTEMD / "sysusers.d/tie.conf").read_text().splitlines() if (words := line.split())}
    for path in _sockets().values():
        mode, owner, group = made[str(path.parent)]
        # The public halves of keys are for everybody who knows their names.
        expected = "2751" if path.parent.name == "keys" else "2750"
        assert (mode, group) == (expected, f"tie-edge-{path.parent.name}")
        assert group in users
        assert owner == "root" or owner in users
    others = set(made) - {str(path.parent) for path in _sockets().values()}
    assert others == {"/run/tie", "/run/tie/assets", "/run/tie/root"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_unit_sees_its_own_edges_only_and_has_their_groups(name):
    settings = _service(name)
    serves = _edges(name, "BindPaths")
    # Key files are bound one by one; only the binding key is read by way of a group.
    seen = _edges(name, "BindReadOnlyPaths") - {"assets"}
    if name == "tie-keys.service":
        assert settings["SupplementaryGroups"] == ["tie-edge-keys tie-kps"], "whom it gives the keys to"
        settings["SupplementaryGroups"] = []
    keys = {path for path in seen if path.startswith("keys/")}
    uses = seen - keys | ({"keys"} if "keys/binding.key" in keys else set())
    groups = {word.removeprefix("tie-edge-") for word in " ".join(settings.get("SupplementaryGroups", [])).split()}
    assert _edges(name, "ReadWritePaths") == serves
    lines = [line.split() for line in (SYSTEMD / "tmpfiles.d/tie.conf").read_text().splitlines()]
    owned = {
        words[1].removeprefix("/run/tie/") for words in lines if words[:1] == ["d"] and words[3:4] == settings["User"]
    }
    assert serves == owned - uses, "a daemon writes in its own directories and nowhere else"
    assert keys <= READS_KEYS.get(name, set())
    assert groups == uses - owned, "a group for each edge that it uses, and no other"


def test_sockets_lie_where_the_configuration_says():
    sockets = NodeConfig().sockets
    assert _service("tie-cloud-app.socket")["ListenStream"] == [str(sockets.app)]
    assert _service("cb_jobhelper.socket")["ListenStream"] == [str(sockets.jobhelper)]
    for name in ("tie-cloud-app.socket", "cb_jobhelper.socket"):
        edge = Path(_service(name)["ListenStream"][0]).parent.name
        assert _service(name)["SocketGroup"] == [f"tie-edge-{edge}"]


def test_an_instance_outlives_the_longest_wait_and_the_longest_request():
    # A pair that waits ahead of time leaves with the runtime that it is connected to.
    config = NodeConfig()
    waits = config.controller.recycle_interval_s * (1 + config.controller.recycle_jitter)
    longest = waits + config.controller.fresh_runtime_deadline_s + config.controller.drain_deadline_s
    for name in ("tie-cloud-app@.service", "cb_jobhelper@.service"):
        (bound,) = _service(name)["RuntimeMaxSec"]
        assert int(bound.removesuffix("min")) * 60 > longest + config.app.time_limit_s


def test_the_preset_enables_what_can_be_enabled(units):
    installable = {unit.name for unit in units if "[Install]" in unit.read_text()}
    preset = (SYSTEMD / "tie.preset").read_text().splitlines()
    assert {line.split()[1] for line in preset if line.startswith("enable ")} == installable


def test_the_installed_configuration_fits_the_units():
    config = load(SYSTEMD / "node.toml")
    assert config.run_dir == NodeConfig().run_dir
    assert config.model.bundle.startswith("/var/lib/tie/assets/")
    assert [list(config.owner.allowed_users)] == [_service("tie-afm-runtime.service")["User"]]
