"""How long the controller goes on trying, and how sure it wants to be. Pure: the clock is passed in.

- A node that has just been lost returns at once; one that is lost again soon after returns only when its gates have
  held for a while, longer each time. A flapping peer thus makes a node that is away, not one that flaps.
- Recycles for errors that bring no lasting peace escalate: after `attempts` of them the model owner is asked to end
  (its memory may be what is wrong), with each further one until it has heard; after as many again the node gives up.
- A node that has been away for `give_up_s`, for whatever reason, gives up as well.

Giving up means: no more recycles for errors, and somebody is called. The node still returns by itself when all gates
hold; that, or an operator's recycle, begins the count anew.
"""

from typing import Final

SOON_S: Final = 60.0  # a loss within this time of the return is one of the same trouble
LONGEST_HOLD_S: Final = 30.0


class Endurance:
    """Counts.

    Args:
        attempts: recycles for errors before the next step of the ladder.
        give_up_s: how long the node may be away.

    Attributes:
        given_up: whether it has.
    """

    def __init__(self, attempts: int, give_up_s: float) -> None:
        self.given_up = False
        self._attempts = attempts
        self._give_up_s = give_up_s
        self._spent = 0
        self._owner_asked = False
        self._hold_s = 0.0
        self._ready_since: float | None = None
        self._available_since: float | None = None
        self._away_since: float | None = None

    @property
    def hold_s(self) -> float:
        """How long the gates have to hold before the node returns."""
        return self._hold_s

    def available(self, now: float) -> None:
        """The node has become available."""
        self._available_since, self._away_since = now, None

    def lost(self, now: float) -> None:
        """An available node was lost for an error."""
        soon = self._available_since is not None and now - self._available_since < SOON_S
        self._hold_s = min(max(1.0, self._hold_s * 2), LONGEST_HOLD_S) if soon else 0.0
        self._available_since, self._ready_since = None, None

    def withdrawn(self) -> None:
        """The node has left service on purpose: that is neither a loss nor an absence."""
        self._available_since = self._away_since = None

    def steady(self, now: float, *, ready: bool) -> bool:
        """Whether the gates hold, and have held for as long as is wanted of this node."""
        if not ready:
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        return now - self._ready_since >= self._hold_s

    def tried(self) -> None:
        """A recycle for an error begins."""
        self._spent += 1

    def exhausted(self) -> bool:
        """Whether the next step of the ladder is due instead of one more recycle."""
        return self._spent >= self._attempts

    def climb(self) -> str:
        """The next step: "owner", which is taken when `owner_asked` says so, or "give-up", which is taken now."""
        if self._owner_asked:
            self.given_up = True
            return "give-up"
        return "owner"

    def owner_asked(self) -> None:
        """The model owner has heard that it is to end, with a recycle that is the first of as many again."""
        self._owner_asked, self._spent = True, 1

    def watch(self, now: float, *, available: bool, excused: bool) -> bool:
        """Looks at how long the node has been away; true once, when it is too long.

        Args:
            now: the clock.
            available: whether the node is.
            excused: whether it is away on purpose.
        """
        if available:
            if self._available_since is not None and now - self._available_since >= SOON_S:
                self.begin_anew()
            return False
        if excused:
            self._away_since = None
            return False
        if self._away_since is None:
            self._away_since = now
        if self.given_up or now - self._away_since < self._give_up_s:
            return False
        self.given_up = True
        return True

    def begin_anew(self) -> None:
        """Lasting peace, or an operator's wish: all counts begin again, and no former loss delays a return."""
        self._spent, self._owner_asked, self.given_up = 0, False, False
        self._away_since, self._hold_s = None, 0.0
