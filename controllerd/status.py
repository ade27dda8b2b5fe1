"""The controller's state as an operator sees it: `NodeStatus`."""

from typing import Any

from controllerd.controller import Controller
from controllerd.states import State
from tie.proto import control_pb2 as pb

STATES = {
    State.INITIALIZING: pb.STATE_INITIALIZING,
    State.AVAILABLE: pb.STATE_AVAILABLE,
    State.DRAINING: pb.STATE_DRAINING,
    State.RECYCLING: pb.STATE_RECYCLING,
    State.ERROR: pb.STATE_ERROR,
    State.MAINTENANCE: pb.STATE_MAINTENANCE,
}

_SHOWN = 32  # transitions in a status


def node_status(controller: Controller) -> pb.NodeStatus:
    """Everything, at this moment. A peer that is gone shows its last message: the `Peer` fields tell."""
    now = controller.clock()
    status = pb.NodeStatus(
        node_id=controller.config.node_id,
        state=STATES[controller.mind.state],
        reasons=controller.mind.reasons,
        state_age_s=now - controller.mind.since,
        next_recycle_s=controller.mind.timer.remaining(now) or 0.0,
        recycles=sum(controller.mind.recycles.values()),
        last_recycle_reason=controller.mind.recycle.reason if controller.mind.recycle else "",
        last_recycle_s=controller.mind.last_recycle_s,
        runtime=controller.probe.message,
        gpu=controller.gpu.message,
        owner=controller.owner.message,
        in_flight=controller.cloudboard.in_flight,
        maintenance=controller.mind.memory.maintenance,
        keys=controller.cloudboard.keys,
        notes=["disk-full"] if controller.witness.disk_full else [],
        word=_word(controller),
    )
    _peer(status.probe_peer, controller.probe)
    _peer(status.gpu_peer, controller.gpu)
    _peer(status.owner_peer, controller.owner)
    _peer(status.store_peer, controller.store)
    status.cloudboard_peer.connected = controller.cloudboard.attached
    status.cloudboard_peer.age_s = controller.cloudboard.age_s
    for entry in controller.journal.transitions()[-_SHOWN:]:
        event = status.events.add(age_s=now - entry.at, to=STATES[State[entry.after.upper()]], reason=entry.code)
        setattr(event, "from", STATES[State[entry.before.upper()]])  # a keyword in Python
    return status


def essence(status: pb.NodeStatus) -> tuple[Any, ...]:
    """What a watcher wants to hear of at once when it changes."""
    return (
        status.state,
        tuple(status.reasons),
        status.recycles,
        status.in_flight,
        status.maintenance,
        status.runtime.instance_id,
        status.runtime.state,
        status.gpu.verdict,
        status.owner.state,
        (status.probe_peer.connected, status.gpu_peer.connected),
        (status.owner_peer.connected, status.cloudboard_peer.connected),
        (status.store_peer.connected, status.keys, status.word, tuple(status.notes)),
    )


def _word(controller: Controller) -> str:
    """An operator's, where what it was given for is still going on."""
    mind = controller.mind
    under_way = mind.recycle is not None and mind.moving and mind.recycle.word
    return under_way or mind.word


def _peer(entry: pb.Peer, peer: Any) -> None:
    entry.connected = peer.connected
    entry.age_s = peer.age_s
