"""Children of `tie up`: what they get, how they end, what they leave behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from tie.cli.process import Child

DEADLINE = 20.0


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


async def run(argv: list[str], **options: object) -> tuple[int, list[str]]:
    lines: list[str] = []
    child = Child("test", argv, environment=dict(os.environ), on_line=lines.append, **options)  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE):
        code = await child.wait()
        while lines[-1:] != ["end"]:  # the pipe's end may come after the process's
            await asyncio.sleep(0.01)
    return code, lines


async def test_lines_and_exit_code() -> None:
    code, lines = await run(python("import sys; print('one'); sys.stderr.write('two\\nend'); sys.exit(3)"))
    assert code == 3
    assert sorted(lines[:-1]) == ["one", "two"]


async def test_a_very_long_line_is_cut_and_loses_nothing() -> None:
    _, lines = await run(python("print('x' * 100_000); print('end')"))
    assert "".join(lines) == "x" * 100_000 + "end"


async def test_unreadable_bytes_are_replaced() -> None:
    _, lines = await run(python("import os; os.write(1, b'\\xff\\n'); print('end')"))
    assert lines == ["�", "end"]


async def test_a_missing_program_says_so() -> None:
    lines: list[str] = []
    child = Child("test", ["/nonexistent/program"], environment={}, on_line=lines.append)
    async with asyncio.timeout(DEADLINE):
        assert await child.wait() == 127
        while not lines:
            await asyncio.sleep(0.01)
    assert lines == ["cannot start /nonexistent/program: No such file or directory"]


async def test_it_stands_back_as_far_as_it_is_told() -> None:
    _, lines = await run(python("import os; print(os.nice(0)); print('end')"), niceness=7)
    assert lines == [str(min(19, os.nice(0) + 7)), "end"]


async def test_it_has_its_own_session_and_no_foreign_descriptor() -> None:
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    try:
        program = "import os; print(os.getsid(0) == os.getpid(), sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
        _, lines = await run(python(program + "; print('end')"))
    finally:
        os.close(leak)
    assert lines == ["True [0, 1, 2]", "end"]


async def test_stop_ends_a_process_that_ignores_sigterm_after_the_deadline() -> None:
    lines: list[str] = []
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('set', flush=True); time.sleep(99)"
    )
    child = Child("test", python(program), environment=dict(os.environ), on_line=lines.append)
    async with asyncio.timeout(DEADLINE):
        while not lines:
            await asyncio.sleep(0.01)
        assert await child.stop(0.1) is False
        assert await child.wait() == -signal.SIGKILL


async def test_the_rest_of_its_process_group_ends_with_it() -> None:
    lines: list[str] = []
    program = "import subprocess; print(subprocess.Popen(['sleep', '99']).pid, flush=True)"
    child = Child("test", python(program), environment=dict(os.environ), on_line=lines.append)
    async with asyncio.timeout(DEADLINE):
        await child.wait()
        while not lines:
            await asyncio.sleep(0.01)
        await gone(int(lines[0]))


PARENT = """
import asyncio, os, sys
from tie.cli.process import Child
async def main():
    lines = []
    child = Child("test", [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(99)"],
                  environment=dict(os.environ), on_line=lines.append)
    while not lines:
        await asyncio.sleep(0.01)
    print(child.pid, flush=True)
    await asyncio.sleep(99)
asyncio.run(main())
"""


async def test_it_dies_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen(python(PARENT), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline())
        parent.kill()
        async with asyncio.timeout(DEADLINE):
            await gone(pid)


ORPHANAGE = """
import asyncio, os, signal, subprocess, sys
from pathlib import Path
from tie.cli.process import Child, kill_orphans
from tie.daemon.hardening import adopt_orphans

# A daemon whose worker leaves its process group: killing the group would miss it.
DAEMON = "import subprocess; print(subprocess.Popen(['sleep', '99'], start_new_session=True).pid, flush=True)"

async def main():
    adopt_orphans()
    known = set()
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, lambda: kill_orphans(known))
    lines = []
    child = Child("daemon", [sys.executable, "-c", DAEMON], environment=dict(os.environ), on_line=lines.append)
    known.add(child.pid)
    await child.wait()
    while not lines or Path(f"/proc/{lines[0]}").exists():
        await asyncio.sleep(0.01)
    print("gone")
asyncio.run(asyncio.wait_for(main(), 15))
"""


def test_what_a_dead_daemon_leaves_behind_is_ended() -> None:
    done = subprocess.run(python(ORPHANAGE), capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.stdout, done.stderr) == ("gone\n", "")


async def gone(pid: int) -> None:
    """Waits until a process has ended (a zombie has)."""
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        await asyncio.sleep(0.01)
