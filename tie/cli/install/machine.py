"""The machine that is installed on: this one, or the tree of an image of one; and where everything goes on it.

Nothing lands where a package manager's files are: units, accounts and directories are local software's
(`/usr/local/lib`, systemd.unit(5)), so that a package may come later, and an operator's files in /etc win over both.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from tie.daemon.errors import ConfigError

PREFIX: Final = PurePosixPath("/opt/tie")  # a link to the tree in use: what units and people name
TREES: Final = PurePosixPath("/opt/tie-trees")
CONFIG: Final = PurePosixPath("/etc/tie/node.toml")
STATE: Final = PurePosixPath("/var/lib/tie")
ASSETS: Final = STATE / "assets"
RUN: Final = PurePosixPath("/run/tie")
MAINTENANCE: Final = RUN / "control/maintenance"  # the controller's note that an operator holds the node out of service
COMMAND: Final = PurePosixPath("/usr/local/bin/tie")
UNITS: Final = PurePosixPath("/usr/local/lib/systemd/system")
PRESETS: Final = PurePosixPath("/usr/local/lib/systemd/system-preset")
SYSUSERS: Final = PurePosixPath("/usr/local/lib/sysusers.d/tie.conf")
TMPFILES: Final = PurePosixPath("/usr/local/lib/tmpfiles.d/tie.conf")
TARGET: Final = "tie.target"
KEYS: Final = "tie-keys.service"
# The oldest on which the units have been tried.
_SYSTEMD: Final = 252
_COMMAND_S: Final = 180.0


@dataclass(frozen=True)
class Machine:
    """Where a node is put.

    Attributes:
        root: "/" for this machine, else an image's tree.
    """

    root: Path = Path("/")

    @property
    def live(self) -> bool:
        """Whether systemd runs this machine; else units are only put there, and enabled for the next boot."""
        return self.root == Path("/") and Path("/run/systemd/system").is_dir()

    @property
    def python(self) -> Path:
        """The interpreter of the node, as the machine sees it: units see /usr only."""
        return Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")

    def at(self, path: PurePosixPath) -> Path:
        """Where a path of the machine is from here."""
        return self.root / path.relative_to("/")

    def link(self, path: PurePosixPath) -> str:
        """What a symbolic link says; empty where there is none."""
        found = self.at(path)
        return str(found.readlink()) if found.is_symlink() else ""

    def check(self, *, root: bool = True) -> None:
        """Refuses a machine that a node cannot be put on, before anything is touched.

        Args:
            root: whether this process has to be root's: not to see only what would be done.

        Raises:
            ConfigError: it says what is missing.
        """
        if root and os.geteuid() != 0:
            raise ConfigError("an installation needs root", hint="sudo, or --dry-run to see what it would do")
        if not self.root.is_dir():
            raise ConfigError(f"{self.root} is no directory")
        if not self.at(PurePosixPath("/usr/lib/systemd/systemd")).exists():
            raise ConfigError(f"there is no systemd in {self.root}", hint="`tie up` runs a node without it")
        version = self.python.name.removeprefix("python")
        if not self._has(self.python):
            raise ConfigError(
                f"there is no {self.python} in {self.root}, and units see no interpreter outside /usr",
                hint=f"apt-get install python{version}, or set up with that interpreter: TIE_PYTHON={self.python}",
            )
        library = f"libpython{version}.so.1.0"
        if not any(self._has(folder / library) for folder in self._libraries()):
            hint = f"apt-get install libpython{version}"
            raise ConfigError(f"there is no {library} below /usr in {self.root}", hint=hint)
        found = self.systemctl("--version").split()
        if len(found) > 1 and found[1].isdigit() and int(found[1]) < _SYSTEMD:
            hint = f"needs {_SYSTEMD}: Debian 12, Ubuntu 24.04 or newer"
            raise ConfigError(f"systemd {found[1]} is too old", hint=hint)

    def _libraries(self) -> tuple[PurePosixPath, ...]:
        return tuple(map(PurePosixPath, ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")))

    def _has(self, path: PurePosixPath | Path) -> bool:
        # Links in an image lead to places in that image.
        found = self.root / path.relative_to("/")
        return found.exists() or found.is_symlink()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps a second installation from the machine meanwhile.

        Raises:
            ConfigError: one is under way.
        """
        held = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # a lock that leaves no file
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError("another installation is under way here", hint="wait until it is done") from None
            yield
        finally:
            os.close(held)

    def systemctl(self, *arguments: str) -> str:
        """Runs systemctl, on the image's files where this is one. Raises as `run`."""
        where = () if self.root == Path("/") else (f"--root={self.root}",)
        return self.run("systemctl", *where, *arguments)

    def run(self, *argv: str, stdin: str = "") -> str:
        """Runs a program with a text to read and returns its output.

        Raises:
            ConfigError: it is not there, does not end, or fails; the message has its last words.
        """
        if shutil.which(argv[0]) is None:
            raise ConfigError(f"{argv[0]} is not installed", hint="apt-get install systemd passwd")
        try:
            done = subprocess.run(argv, capture_output=True, text=True, input=stdin, timeout=_COMMAND_S, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"`{' '.join(argv)}` did not end within {_COMMAND_S:g} s") from None
        if done.returncode != 0:
            words = (done.stderr or done.stdout).strip()[-400:]
            raise ConfigError(f"`{' '.join(argv)}` failed with {done.returncode}: {words}")
        return done.stdout

    def is_active(self, unit: str) -> bool:
        """Whether a unit runs (never, in an image)."""
        if not self.live:
            return False
        command = ["systemctl", "is-active", "--quiet", unit]
        return subprocess.run(command, check=False, timeout=_COMMAND_S).returncode == 0
