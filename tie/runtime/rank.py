"""A rank other than 0, a process of its own (`python -m tie.runtime.rank DESCRIPTOR`), started and fed by rank 0.

It attaches to the model owner for itself, computes its part of each batch that rank 0 sends, and exchanges what the
others need with them. Its KV pool is memory that rank 0 maps too: so blocks go in and out between two steps without its
help. It lives no longer than rank 0, and whatever goes wrong here ends it, which ends the runtime.
"""

import mmap
import os
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from kvxfer import seals
from kvxfer.channel import Channel
from tie.bones.config import ModelConfig
from tie.daemon import log
from tie.daemon.config import NodeConfig
from tie.daemon.errors import PeerDiedError, PeerTimeoutError, ProtocolError
from tie.daemon.hardening import die_with_parent, protect_process
from tie.daemon.layout import layout_for, split_for
from tie.proto import ranks_pb2
from tie.runtime import environment
from tie.runtime.executors import block_count
from tie.runtime.owner_client import attach
from tie.runtime.rank_channel import RankChannel, batch_of

_FIRST_S: Final = 30.0  # rank 0 has nothing to do but to say who this is
_IDLE_S: Final = 60.0
_EXIT_FAILED: Final = 70  # sysexits.h EX_SOFTWARE


def main() -> NoReturn:
    """The program."""
    die_with_parent(signal.SIGKILL)  # rank 0's thread that started this one; a parent gone before that is end-of-file
    protect_process()
    channel = RankChannel(Channel.adopt(int(sys.argv[1])))
    code = 0
    try:
        serve(channel)
    except PeerDiedError:
        pass  # rank 0 has ended, or wants this one to
    except BaseException as error:  # noqa: BLE001 (whatever it is, this rank is of no use any more)
        log.failure("rank.failed", error)
        code = _EXIT_FAILED
    os._exit(code)  # without waiting for gloo's threads, which may be waiting for a rank that is gone


def serve(channel: RankChannel) -> NoReturn:
    """Joins rank 0 and computes what it says.

    Raises:
        PeerDiedError: rank 0 is gone.
        PeerError: rank 0 or the owner is silent, or makes no sense.
        BonesError: another rank is gone, or the model cannot be split so.
    """
    start = _told(channel, "start", timeout=_FIRST_S).start
    config = msgspec.json.decode(start.config, type=NodeConfig)
    runtime = config.runtime
    split = split_for(runtime).of(start.rank)
    patience = config.probe.start_deadline_s
    weights = attach(
        config.sockets.owner,
        layout_for(runtime),
        timeout=patience,
        progress=lambda _done, _total: None,
        rank=split.rank,
        world_size=split.world_size,
    )
    # PyTorch, after what rank 0 may have to wait for.
    from tie.bones.arena import tensor_views
    from tie.bones.attention import block_bytes
    from tie.bones.executor import DTYPES
    from tie.bones.parallel import Links, RankExecutor

    model = ModelConfig.from_json(weights.config_json)
    joined = ranks_pb2.Joined(
        owner_instance=weights.owner_instance,
        generation=weights.generation,
        model=weights.model,
        release=weights.release,
        block_bytes=block_bytes(split.config(model), runtime.block_tokens, DTYPES[runtime.dtype]),
        block_count=block_count(runtime),
    )
    size = joined.block_bytes * joined.block_count
    descriptor = seals.create("tie-rank-kv", size)
    seals.add(descriptor, seals.FIXED)
    links = Links(split, timeout=runtime.rank_deadline_s)
    executor = RankExecutor(
        model,
        tensor_views(weights.arena, weights.entries),
        links,
        num_blocks=joined.block_count,
        block_tokens=runtime.block_tokens,
        dtype=runtime.dtype,
        threads=environment.thread_count(runtime),
        memory=mmap.mmap(descriptor, size),
    )
    channel.send(joined, [descriptor], timeout=patience)
    os.close(descriptor)
    links.meet(Path(_told(channel, "meet", timeout=patience).meet.path))
    log.event("rank.joined", rank=split.rank, layout=executor.layout_id)
    while True:
        try:
            step = _told(channel, "step", timeout=_IDLE_S).step
        except PeerTimeoutError:
            continue  # nobody asks for anything
        executor.forward(batch_of(step))


def _told(channel: RankChannel, kind: str, *, timeout: float) -> ranks_pb2.ToRank:
    message, descriptors = channel.receive(ranks_pb2.ToRank, timeout=timeout)
    for descriptor in descriptors:
        os.close(descriptor)
    if message.WhichOneof("kind") != kind:
        raise ProtocolError("rank 0: a message out of order")
    return message


if __name__ == "__main__":
    main()
