"""What `./run` does: sets up a checkout and runs something in it.

Standard library only, since nothing else is there yet. Safe to repeat, safe to interrupt, asks nothing.
"""

import os
import signal

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # while the rest is imported, nothing is begun yet
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

import ctypes
import errno
import fcntl
import hashlib
import importlib.util
import json
import platform
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

USAGE = """\
usage: ./run COMMAND [ARGUMENTS]

  demo        start a node, ask the model, recycle the runtime, ask again, stop everything
  tie …       the `tie` command, for example `./run tie up`, `./run tie chat`, `./run tie --help`
  test …      linters, type checks, import contracts and all tests; arguments go to pytest
  setup       only set up, with all that the tests need (every other command sets up what it needs itself)
  lock        bring requirements.lock up to pyproject.toml; --upgrade takes the newest of everything

The environment is made in .venv, the demo model in .run; both are ignored by git and safe to delete. Where
the checkout is set up but read-only, the demo model goes to $TIE_CACHE_DIR or your cache folder.
"""

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements.lock"
STAMP = VENV / ".tie-setup"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
# Not in the lock: an index may offer it as a CPU build of 200 MB or as a CUDA build of gigabytes, and the machine's own
# pip configuration decides which.
TORCH = "torch==2.13.0"


class SetupError(Exception):
    """Something that the person at the keyboard has to do."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"run: {text}", flush=True)


def main() -> int:
    """Runs one command."""
    command, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command not in ("demo", "tie", "test", "setup", "lock"):
        print(f"run: there is no command {command!r}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    if (ROOT / ".run").exists() or os.access(ROOT, os.W_OK):  # else the user's cache folder, as without `./run`
        os.environ.setdefault("TIE_CACHE_DIR", str(ROOT / ".run"))
    try:
        if command == "lock":
            script = str(ROOT / "tie" / "cli" / "lock.py")
            os.execv(sys.executable, [sys.executable, "-P", script, *arguments])  # noqa: S606 (no shell)
        set_up()
        if command == "test":
            install(for_the_tests())
        # A node computes with the compiled step; PyTorch is what the tests compare it with.
        if command in ("setup", "test") or not computes_without_torch():
            with alone():
                install_torch()
    except SetupError as error:
        print(f"run: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"run: cannot set up {ROOT}: {error}", file=sys.stderr)
        print("  Is it another user's, or read-only, or the disk full? A clone of your own may do.", file=sys.stderr)
        return 1
    if command == "demo":
        execute("tie", "demo", *arguments)
    if command == "tie":
        execute("tie", *arguments)
    if command == "test":
        test(arguments)
    say(f"ready: {VENV}")
    return 0


def execute(program: str, *arguments: str) -> NoReturn:
    """Becomes a program of the environment."""
    path = VENV / "bin" / program
    if program == "tie":  # Ctrl-C waits until it can answer: `tie.cli.main` unblocks it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execv(path, [str(path), *arguments])  # noqa: S606 (no shell)


# ---- setting up ------------------------------------------------------------------------------------------------------


def has_shared_library() -> bool:
    """Whether the libpython of this interpreter's version can be loaded."""
    try:
        ctypes.CDLL(f"libpython{VERSION}.so.1.0")
    except OSError:
        return False
    return True


def set_up() -> None:
    """Makes .venv what requirements.lock and pyproject.toml say. Does nothing when it already is."""
    wanted = fingerprint()
    if is_set_up(wanted):
        return
    with alone():
        if not is_set_up(wanted):  # another run may have done it meanwhile
            set_up_anew(wanted)


def is_set_up(wanted: str) -> bool:
    """Whether .venv is there and was made from what `wanted` stands for."""
    there = PYTHON.exists() and (VENV / "bin" / "tie").exists()
    return there and STAMP.is_file() and STAMP.read_text() == wanted


@contextmanager
def alone() -> Iterator[None]:
    """Two runs that set up one checkout at once would spoil each other's environment: the second one waits.

    The lock is on the checkout's own directory, so nothing is left of it, whatever ends the process.
    """
    checkout = os.open(ROOT, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(checkout, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another ./run is setting up this checkout: waiting until it is done")
            fcntl.flock(checkout, fcntl.LOCK_EX)
        yield
    finally:
        os.close(checkout)


def set_up_anew(wanted: str) -> None:
    """Makes .venv, and writes down what it was made from."""
    started = time.monotonic()
    if platform.machine() != "x86_64":
        raise SetupError(f"the Triton server comes as a wheel for x86_64 only; this machine is {platform.machine()}")
    for place in (ROOT, VENV):  # known before anything is downloaded, and said as what it is
        if place.exists() and not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    say(f"setting up {VENV} with Python {platform.python_version()} (once; later runs skip this)")
    install(for_the_node())
    make_venv()
    count = sum(1 for line in LOCK.read_text().splitlines() if "==" in line)
    say(f"[2/3] {count} packages from requirements.lock")
    pip("install", "--no-deps", "--require-hashes", "-r", str(LOCK), count=count)
    say("[3/3] this project, compiled: some minutes where there is a compiler")
    pip("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    check_environment()
    STAMP.write_text(wanted)
    say(f"set up in {time.monotonic() - started:.0f} s")


def computes_without_torch() -> bool:
    """Whether the compiled forward step was built, and is a fast one on this processor."""
    program = "from tie.bones.native import library; raise SystemExit(not library.fast())"
    return asked(program) == 0


def asked(program: str) -> int:
    """The exit code of a few lines in the environment's Python; out of Ctrl-C's reach, which is for us to answer."""
    command = [str(PYTHON), "-P", "-c", program]
    return subprocess.run(command, check=False, cwd=ROOT, start_new_session=True).returncode


def fingerprint() -> str:
    """Changes whenever the environment has to be made anew."""
    parts = [LOCK.read_bytes(), (ROOT / "pyproject.toml").read_bytes()]
    native = ROOT / "tie" / "bones" / "native"  # compiled when the project is installed
    parts += [path.read_bytes() for path in sorted([*native.glob("*.h"), *native.glob("*.cpp")])]
    parts += [item.encode() for item in (str(ROOT), TORCH, VERSION)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def for_the_node() -> list[str]:
    """Missing system packages that a node needs: the shared libpython for Triton's Python stub, and pip's own."""
    missing = []
    if not has_shared_library():
        missing.append(f"libpython{VERSION}")
    if importlib.util.find_spec("ensurepip") is None:
        missing.append(f"python{VERSION}-venv")
    # For bones' native step. Without a compiler PyTorch is installed instead: nobody must become root for it.
    if shutil.which("g++") is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        missing.append("g++")
    return missing


def for_the_tests() -> list[str]:
    """Missing system packages of programs that tests call."""
    programs = (
        ("ss", ["iproute2"]),
        ("systemd-analyze", ["systemd"]),
        ("systemd-nspawn", ["systemd-container"]),
        ("cc", ["gcc", "libc6-dev"]),
        ("git", ["git"]),
    )
    return [name for program, packages in programs if shutil.which(program) is None for name in packages]


def install(missing: list[str]) -> None:
    """Installs Debian packages when that is possible.

    Raises:
        SetupError: it is not; the message has the command.
    """
    if not missing:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        prefix = "" if os.geteuid() == 0 else "sudo "
        raise SetupError(
            f"this machine lacks {', '.join(missing)}. On Debian or Ubuntu:\n  {prefix}{' '.join(command)}"
        )
    say(f"installing system packages: {' '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for attempt in (command, ["apt-get", "update"], command):
        result = subprocess.run(
            attempt, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, check=False
        )
        if result.returncode == 0 and attempt is command:
            return
    raise SetupError(f"could not install them:\n{result.stderr.strip()}\nTry by hand: {' '.join(command)}")


def make_venv() -> None:
    """An empty environment of this interpreter, or the one that is there when it fits."""
    say("[1/3] environment")
    if PYTHON.exists():
        # One deleted or made halfway can have a `python` that is the machine's own: pip would install there.
        probe = "import sys, pip; print('%d.%d' % sys.version_info[:2], sys.prefix != sys.base_prefix)"
        have = subprocess.run([str(PYTHON), "-c", probe], capture_output=True, text=True, check=False)
        if have.stdout.split() == [VERSION, "True"]:
            return
    STAMP.unlink(missing_ok=True)
    made = subprocess.run(
        [sys.executable, "-P", "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise SetupError(f"cannot make {VENV}:\n{made.stdout}{made.stderr}")


def install_torch() -> None:
    """Torch, after saying how much it is. Does nothing when it is there."""
    have = subprocess.run(
        [str(PYTHON), "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if have.stdout.strip().split("+")[0] == TORCH.split("==")[1]:
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip("install", "--dry-run", "--quiet", "--report", str(report), TORCH)
        packages = json.loads(report.read_text())["install"]
    names = [package["metadata"]["name"] for package in packages]
    build = "CUDA build" if any(name.startswith("nvidia-") for name in names) else "CPU build"
    sizes = [size_of(package["download_info"]["url"]) for package in packages]
    remote = sum(size for size, local in sizes if not local)
    local = sum(size for size, local in sizes if local)
    unknown = sum(1 for size, _ in sizes if size == 0)
    parts = [
        f"{remote / 1e6:,.0f} MB to download" if remote else "",
        f"{local / 1e6:,.0f} MB from this disk" if local else "",
    ]
    parts.append(f"{unknown} files of unknown size" if unknown else "")
    say(f"{TORCH}, {build}, {len(names)} packages: {', '.join(part for part in parts if part)}")
    pip("install", TORCH, count=len(names))


def size_of(url: str) -> tuple[int, bool]:
    """The bytes behind a URL that pip chose (0 when it does not say), and whether they lie on this machine."""
    if url.startswith("file:"):
        path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))
        return (path.stat().st_size if path.is_file() else 0), True
    bundle = os.environ.get("PIP_CERT")
    context = ssl.create_default_context(cafile=bundle if bundle and Path(bundle).is_file() else None)
    try:
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310 (pip's own answer)
        with urllib.request.urlopen(request, timeout=20, context=context) as reply:  # noqa: S310
            return int(reply.headers.get("Content-Length") or 0), False
    except (urllib.error.URLError, OSError, ValueError):
        return 0, False


def pip(*arguments: str, count: int = 0) -> None:
    """Runs the environment's pip with one line of progress that follows its output."""
    options = ["--require-virtualenv", "--no-input", "--disable-pip-version-check"]
    command = [str(PYTHON), "-P", "-m", "pip", *options, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL
    )
    tail: list[str] = []
    seen = 0
    spoken = time.monotonic()
    terminal = sys.stdout.isatty()
    width = min(100, shutil.get_terminal_size().columns - 1)
    with process:
        for line in process.stdout or ():
            tail = [*tail[-30:], line.rstrip()]
            doing = re.match(
                r"\s*(Collecting|Downloading|Installing|Processing|Building|Requirement already)\b[^\n]*", line
            )
            if not doing:
                continue
            seen += line.startswith(("Collecting", "Processing", "Requirement already"))
            text = f"     {min(seen, count)}/{count} " if count else "     "
            text += " ".join(re.split(r"[ (\[]| --hash", doing.group(0).strip())[:2])
            if terminal:
                print(f"\r{text[:width]:<{width}}", end="", flush=True)
            elif time.monotonic() - spoken > 10:
                spoken = time.monotonic()
                print(text, flush=True)
    if terminal:
        print("\r" + " " * width + "\r", end="", flush=True)
    if process.returncode != 0:
        raise SetupError("pip failed: " + " ".join(command) + "\n  " + "\n  ".join(tail))


def check_environment() -> None:
    """What would break the node in ways that are hard to see."""
    program = "import numpy; raise SystemExit(int(numpy.__version__.split('.')[0]) > 1)"
    if asked(program) != 0:
        raise SetupError("NumPy 2 or newer is in .venv: Triton 2.51 corrupts its arrays. Delete .venv and run again")


# ---- checking --------------------------------------------------------------------------------------------------------


def test(arguments: list[str]) -> NoReturn:
    """Everything that must hold before a change lands: linters, type checks and import contracts are tests as well."""
    os.chdir(ROOT)
    # All of them: two files at a time, for each waits for nodes much of the time. More would not fit small machines.
    execute("pytest", "-q", *(arguments or ["-n", "2", "--dist", "loadfile"]))


if __name__ == "__main__":
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nrun: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
