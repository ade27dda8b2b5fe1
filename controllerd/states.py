"""The node's state machine, as one explicit table. Pure: (state, event) → (state, actions).

            ┌──────────────── READY ────────────────┐
            │                                       ▼
      INITIALIZING ──BROKEN──▶ ERROR ◀──LOST/BROKEN── AVAILABLE
            │  RECYCLE           │ RECYCLE              │ RECYCLE
            └────────┬───────────┴──────────────────────┘
                     ▼
                 DRAINING ──DRAINED──▶ RECYCLING ──READY──▶ AVAILABLE
                                           │ OVERDUE/BROKEN ──▶ ERROR
                                           └─RESTED──▶ MAINTENANCE ──MAINTENANCE_OFF──▶ INITIALIZING

What the events mean is decided in `gates`; what the actions do, in `controller`.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Final


class State(IntEnum):
    """Numbers equal those of control.proto."""

    INITIALIZING = 1
    AVAILABLE = 2
    DRAINING = 3
    RECYCLING = 4
    ERROR = 5
    MAINTENANCE = 6


class Event(Enum):
    """What can happen to a node."""

    READY = "ready"  # every gate holds and maintenance is off
    LOST = "lost"  # some gate does not hold
    BROKEN = "broken"  # a part says of itself that it has failed
    RECYCLE = "recycle"  # one is wanted: timer, operator, error, owner, asset
    DRAINED = "drained"  # the old runtime has let go of its requests, or its time is up
    OVERDUE = "overdue"  # no fresh runtime within the deadline
    RESTED = "rested"  # maintenance is on and a fresh runtime is ready: nothing private is left
    MAINTENANCE_ON = "maintenance-on"
    MAINTENANCE_OFF = "maintenance-off"


class Action(Enum):
    """What a transition asks of the controller."""

    REPORT = "report"  # tell CloudBoard the new state
    RECYCLE = "recycle"  # start the procedure that ends with DRAINED


Step = tuple[State, tuple[Action, ...]]

_REPORT: Final = (Action.REPORT,)
_BEGIN: Final[Step] = (State.DRAINING, (Action.REPORT, Action.RECYCLE))

TABLE: Final[Mapping[tuple[State, Event], Step]] = {
    (State.INITIALIZING, Event.READY): (State.AVAILABLE, _REPORT),
    (State.INITIALIZING, Event.BROKEN): (State.ERROR, _REPORT),
    (State.INITIALIZING, Event.RECYCLE): _BEGIN,
    (State.INITIALIZING, Event.MAINTENANCE_ON): _BEGIN,
    (State.AVAILABLE, Event.LOST): (State.ERROR, _REPORT),
    (State.AVAILABLE, Event.BROKEN): (State.ERROR, _REPORT),
    (State.AVAILABLE, Event.RECYCLE): _BEGIN,
    (State.AVAILABLE, Event.MAINTENANCE_ON): _BEGIN,
    (State.DRAINING, Event.DRAINED): (State.RECYCLING, _REPORT),
    (State.RECYCLING, Event.READY): (State.AVAILABLE, _REPORT),
    (State.RECYCLING, Event.RESTED): (State.MAINTENANCE, _REPORT),
    (State.RECYCLING, Event.BROKEN): (State.ERROR, _REPORT),
    (State.RECYCLING, Event.OVERDUE): (State.ERROR, _REPORT),
    (State.ERROR, Event.READY): (State.AVAILABLE, _REPORT),
    (State.ERROR, Event.RESTED): (State.MAINTENANCE, _REPORT),
    (State.ERROR, Event.RECYCLE): _BEGIN,
    (State.ERROR, Event.MAINTENANCE_ON): _BEGIN,
    (State.MAINTENANCE, Event.RECYCLE): _BEGIN,
    (State.MAINTENANCE, Event.MAINTENANCE_OFF): (State.INITIALIZING, _REPORT),
}


def step(state: State, event: Event) -> Step:
    """What `event` does in `state`; an event without a row changes nothing."""
    return TABLE.get((state, event), (state, ()))
