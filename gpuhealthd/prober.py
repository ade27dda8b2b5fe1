"""The parent's side of the prober: asks the child on time and always has an answer.

A look that does not come back within the deadline is a verdict ("probe-hung"), not a reason to wait. A hung child is
left alone for ten deadlines, since a slow driver may still answer; then it is killed, and a new one starts only when
the kernel has let go of the old one, so at most one process ever sits in a stuck driver call. Children that die are
replaced with a doubling pause.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from gpuhealthd.classify import Assessment, History, blind, classify
from gpuhealthd.history import Archive
from gpuhealthd.rules import Policy
from gpuhealthd.snapshot import MAX_MESSAGE_BYTES, Provider, decode
from gpuhealthd.verdicts import Verdict
from tie.daemon import log
from tie.daemon.errors import ProtocolError

_KILL_AFTER_DEADLINES: Final = 10
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0
_REAP_POLL_S: Final = 0.05
_LAST_WAIT_S: Final = 1.0


class Prober:
    """Runs the child and keeps the newest assessment.

    Args:
        provider: "cpu" or "nvml".
        policy: the operator's thresholds.
        interval_s: between two looks.
        deadline_s: a look that takes longer has hung; an assessment older than this is stale.
        on_change: called when a new assessment is there.
        kernel_log: where the child finds the kernel's log.
        archive: what was known before this process started, and keeps what it learns; None for nothing.
    """

    def __init__(
        self,
        provider: Provider,
        policy: Policy,
        *,
        interval_s: float,
        deadline_s: float,
        on_change: Callable[[], None],
        kernel_log: str = "/dev/kmsg",
        archive: Archive | None = None,
    ) -> None:
        self.provider = provider
        self._policy = policy
        self._interval_s = interval_s
        self._deadline_s = deadline_s
        self._on_change = on_change
        self._command = [sys.executable, "-P", "-m", "gpuhealthd.worker", provider, kernel_log]
        self._archive = archive
        # A start is no fault to recover from: the history is as it was.
        self._history, self._log_position = archive.load() if archive else (History(), -1)
        self._assessment, _ = blind("probe-starting", self._history)
        self._taken_s: float | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._good = 0
        self.looks = 0
        self.failures = 0

    @property
    def child_pid(self) -> int | None:
        """The child's process id while there is one."""
        return self._child.pid if self._child is not None else None

    def answer(self) -> tuple[Assessment, float]:
        """The assessment in force and its age in seconds (of the newest complete look; infinite before the first)."""
        if self._taken_s is None:
            return self._assessment, float("inf")
        age = time.monotonic() - self._taken_s
        if age > self._deadline_s and self._assessment.node.verdict is not Verdict.UNAVAILABLE:
            # Between two events of the loop below nothing may look healthier than it is known to be.
            return blind("stale", self._history)[0], age
        return self._assessment, age

    def good_for(self) -> float:
        """Seconds for which `answer` stays as it is, if no look comes back."""
        if self._taken_s is None or self._assessment.node.verdict is Verdict.UNAVAILABLE:
            return float("inf")
        left = self._taken_s + self._deadline_s - time.monotonic()
        return left if left > 0 else float("inf")  # it is old already, and stays so

    async def run(self) -> None:
        """Looks for ever. Cancel it to end; the child is killed, and not waited for."""
        try:
            while True:
                code = await self._session()
                self._fail(code)
                await self._reap()
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
        finally:
            self._let_go()

    async def _session(self) -> str:
        """One child's life; returns the code of what ended it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.setblocking(False)
            with theirs:
                arguments = (str(self._log_position), str(theirs.fileno()))
                self._child = _start([*self._command, *arguments], theirs.fileno())
            self._good = 0
            while True:
                began = time.monotonic()
                try:
                    payload = await self._ask(ours)
                    if not payload:
                        return "probe-gone"
                    snapshot = decode(payload)
                    if snapshot.provider != self.provider:
                        return "probe-garbled"
                except TimeoutError:
                    return "probe-hung"
                except ProtocolError:
                    return "probe-garbled"
                except OSError:
                    return "probe-gone"
                self._taken_s = began  # ours, not the child's: the age is then never too young
                self._assessment, self._history = classify(snapshot, self._history, self._policy)
                if snapshot.log_position is not None:
                    self._log_position = snapshot.log_position
                if self._archive:
                    self._archive.save(self._history, self._log_position)
                self.looks += 1
                self._good += 1
                if self._good >= self._policy.recover_after_polls:
                    self._pause_s = _FIRST_PAUSE_S
                self._on_change()
                await asyncio.sleep(max(0.0, began + self._interval_s - time.monotonic()))

    async def _ask(self, channel: socket.socket) -> bytes:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._deadline_s):
            await loop.sock_sendall(channel, b"?")
        reply = asyncio.ensure_future(loop.sock_recv(channel, MAX_MESSAGE_BYTES + 1))
        try:
            done, _ = await asyncio.wait({reply}, timeout=self._deadline_s)
            if not done:
                self._fail("probe-hung")
                done, _ = await asyncio.wait({reply}, timeout=self._deadline_s * (_KILL_AFTER_DEADLINES - 1))
                if not done:
                    raise TimeoutError
            return reply.result()
        finally:
            reply.cancel()

    async def _reap(self) -> None:
        """Kills the child and waits until the kernel has let go of it, however long that takes."""
        child = self._child
        if child is None:
            return
        child.kill()
        # No event tells of it without a thread, and a thread that waits for ever would keep this process from ending.
        while child.poll() is None:  # noqa: ASYNC110
            await asyncio.sleep(_REAP_POLL_S)
        self._child = None

    def _let_go(self) -> None:
        if self._child is not None:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: the kernel ends it when it can
                self._child.wait(_LAST_WAIT_S)

    def _fail(self, code: str) -> None:
        self.failures += 1
        log.event("probe.failed", reason=code)
        self._assessment, self._history = blind(code, self._history)
        self._on_change()


def _start(command: Sequence[str], descriptor: int) -> subprocess.Popen[bytes]:
    # exec, never a bare fork: gRPC's threads do not survive one. The standard streams stay ours for the log.
    return subprocess.Popen(command, pass_fds=(descriptor,), stdin=subprocess.DEVNULL)
