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


def node_status(controller: Controller) -> pb.NodeStatus:
    """Everything, at this moment. A peer that is gone shows its last message: the `Peer` fields tell."""
    now = controller.clock()
    available = controller.state is State.AVAILABLE
    status = pb.NodeStatus(
        node_id=controller.config.node_id,
        state=STATES[controller.state],
        reasons=() if available else controller.readiness.reasons,
        state_age_s=now - controller.since,
        next_recycle_s=controller.timer.remaining(now) or 0.0,
        recycles=sum(controller.recycles.values()),
        last_recycle_reason=controller.recycle.reason if controller.recycle else "",
        last_recycle_s=controller.last_recycle_s,
        runtime=controller.probe.message,
        gpu=controller.gpu.message,
        owner=controller.owner.message,
        in_flight=controller.cloudboard.in_flight,
        maintenance=controller.memory.maintenance,
    )
    _peer(status.probe_peer, controller.probe)
    _peer(status.gpu_peer, controller.gpu)
    _peer(status.owner_peer, controller.owner)
    status.cloudboard_peer.connected = controller.cloudboard.attached
    status.cloudboard_peer.age_s = controller.cloudboard.age_s
    for transition in controller.history:
        event = status.events.add(age_s=now - transition.at, to=STATES[transition.after], reason=transition.reason)
        setattr(event, "from", STATES[transition.before])  # a keyword in Python
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
    )


def _peer(entry: pb.Peer, peer: Any) -> None:
    entry.connected = peer.connected
    entry.age_s = peer.age_s
