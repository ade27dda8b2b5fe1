"""The other ranks of this runtime, as rank 0 sees them: started, watched, told of every batch.

Rank 0 is the process with the engine in it: it alone schedules and samples. The others (`rank`) live as long as it
does, and it as long as they: when one ends, however it ends, the whole runtime does. One that hangs breaks the step
that waits for it when `runtime.rank_deadline_s` is over, which ends the runtime as well.

    start ──▶ joined (ready: weights of the same owner, a KV pool) ──▶ meet (over gloo) ──▶ step, step, …
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import msgspec

from kvxfer import seals
from kvxfer.channel import Channel
from kvxfer.doorbell import left
from kvxfer.errors import KvxferError
from tie.bones.batch import Batch
from tie.bones.config import ModelConfig
from tie.bones.errors import ConfigError as ModelError
from tie.daemon import log
from tie.daemon.config import NodeConfig, RuntimeConfig
from tie.daemon.errors import ConfigError, ProtocolError
from tie.daemon.layout import split_for
from tie.proto import ranks_pb2
from tie.runtime import environment
from tie.runtime.executors import block_count
from tie.runtime.owner_client import Weights
from tie.runtime.rank_channel import RankChannel, step_of
from tie.runtime.ranked_executor import RankedExecutor, RankMemory

_SPAWN_S: Final = 30.0
_LEAVE_S: Final = 5.0  # for a rank that is told to end
_GRACE_S: Final = 1.0  # for a step under way to break, and for the engine to tell its users


class Ranks:
    """Their processes. Those that have not ended are killed with the process, or the thread, that has made them.

    Args:
        config: the node's.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._split = split_for(config.runtime)
        self._channels: list[RankChannel] = []
        self._lock = threading.Lock()
        self._dead = False
        self._on_death: Callable[[], None] | None = None
        self._closing = threading.Event()
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC)
        started: Future[None] = Future()
        # A thread that lasts: the kernel kills them when the thread that started them ends.
        self._thread = threading.Thread(target=self._watch, args=(started,), name="ranks", daemon=True)
        self._thread.start()
        started.result(_SPAWN_S)

    def executor(self, runtime: RuntimeConfig, model: ModelConfig, weights: Weights) -> RankedExecutor:
        """The executor over all ranks, once they have joined; an `executors.Make`.

        Raises:
            ConfigError: the model cannot be split so.
            ModuleNotFoundError: PyTorch is not installed.
            BonesError: the weights are not the model's, or a rank did not come.
            PeerError: a rank has ended, is silent, or has other weights.
        """
        from tie.bones.arena import tensor_views
        from tie.bones.attention import block_bytes
        from tie.bones.executor import DTYPES
        from tie.bones.parallel import Links, RankExecutor

        split = self._split
        deadline = time.monotonic() + self._config.probe.start_deadline_s
        try:
            parts = [split.of(rank).config(model) for rank in range(split.world_size)]
        except ModelError as error:
            hint = "choose another runtime.tensor_parallel or runtime.pipeline_parallel"
            raise ConfigError(str(error), hint=hint) from None
        links = Links(split, timeout=runtime.rank_deadline_s)
        own = RankExecutor(
            model,
            tensor_views(weights.arena, weights.entries),
            links,
            announce=self.announce,
            num_blocks=block_count(runtime),
            block_tokens=runtime.block_tokens,
            dtype=runtime.dtype,
            threads=environment.thread_count(runtime),
        )
        memories = []
        for channel, part in zip(self._channels, parts[1:], strict=True):
            expected = ranks_pb2.Joined(
                owner_instance=weights.owner_instance,
                generation=weights.generation,
                model=weights.model,
                release=weights.release,
                block_bytes=block_bytes(part, runtime.block_tokens, DTYPES[runtime.dtype]),
                block_count=block_count(runtime),
            )
            memories.append(_joined(channel, expected, deadline))
        # Nobody else comes in here; and when they have met, nobody needs it any more.
        directory = Path(tempfile.mkdtemp(prefix="ranks-", dir=self._config.sockets.engine.parent))
        try:
            meeting = directory / "meeting"
            for channel in self._channels:
                meet = ranks_pb2.Meet(path=os.fspath(meeting))
                channel.send(ranks_pb2.ToRank(meet=meet), timeout=left(deadline))
            links.meet(meeting)
        finally:
            shutil.rmtree(directory)
        return RankedExecutor(own, memories)

    def announce(self, batch: Batch) -> None:
        """Tells all of them what is computed next.

        Raises:
            PeerError: one is gone, or does not listen.
        """
        step = step_of(batch)
        for channel in self._channels:
            channel.send(step, timeout=self._config.runtime.rank_deadline_s)

    def follow(self, on_death: Callable[[], None]) -> None:
        """Has `on_death` called, once, a moment after one of them has ended."""
        with self._lock:
            self._on_death = on_death
            dead = self._dead
        if dead:
            on_death()

    def close(self) -> None:
        """Ends them, if they have not ended. Once; nothing may be computed any more."""
        self._closing.set()
        os.write(self._waker, b"x")
        self._thread.join(2 * _LEAVE_S)
        for channel in self._channels:
            channel.close()
        os.close(self._waker)
        os.close(self._woken)

    # --- on the thread of its own ---

    def _watch(self, started: "Future[None]") -> None:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes.extend(self._start(rank) for rank in range(1, self._split.world_size))
        except BaseException as error:  # noqa: BLE001 (it is the caller's)
            _end(processes, 0)
            started.set_exception(error)
            return
        ended = [os.pidfd_open(process.pid) for process in processes]
        started.set_result(None)
        select.select([*ended, self._woken], [], [])
        closing = self._closing.is_set()
        if not closing:
            dead = (rank for rank, process in enumerate(processes, 1) if process.poll() is not None)
            log.event("rank.died", rank=next(dead, None))
        for channel in self._channels if closing else ():
            channel.close()
        _end(processes, _LEAVE_S if closing else 0)
        for descriptor in ended:
            os.close(descriptor)
        if not closing:
            time.sleep(_GRACE_S)
            with self._lock:
                self._dead = True
                on_death = self._on_death
            if on_death:
                on_death()

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        ours, theirs = Channel.pair()
        try:
            descriptor = theirs.fileno()
            python = os.environ.get(environment.PYTHON, sys.executable)  # this one may be embedded
            process = subprocess.Popen(
                [python, "-P", "-m", "tie.runtime.rank", str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        channel = RankChannel(ours)
        self._channels.append(channel)
        start = ranks_pb2.Start(rank=rank, config=msgspec.json.encode(self._config))
        channel.send(ranks_pb2.ToRank(start=start), timeout=_SPAWN_S)
        return process


def _joined(channel: RankChannel, expected: ranks_pb2.Joined, deadline: float) -> RankMemory:
    joined, descriptors = channel.receive(ranks_pb2.Joined, timeout=left(deadline))
    try:
        if joined != expected or len(descriptors) != 1:
            raise ProtocolError("a rank has other weights, or another pool, than rank 0")
        try:
            seals.require(descriptors[0], seals.SIZE, joined.block_bytes * joined.block_count)
        except KvxferError as error:
            raise ProtocolError(f"a rank: {error}") from None
        return RankMemory(descriptors[0], joined.block_bytes, joined.block_count)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _end(processes: "Sequence[subprocess.Popen[bytes]]", patience: float) -> None:
    deadline = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(left(deadline))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
