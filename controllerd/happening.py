"""What the controller tells of a node's life: the words of its journal, for somebody who was asleep."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that an operator may want to know afterwards.

    Kinds, and their codes:

    - "state": the node's state changed; the reason. `count`: requests that were under way when it was lost.
    - "recycle": one began; its reason. `seconds`: what running requests get.
    - "joined": an operator's wish for a recycle met one under way; its reason.
    - "cut": requests had not ended when their time was up; "deadline". `count`: how many.
    - "recycled": one ended; "ok", or what went wrong. `seconds`: how long it took.
    - "runtime": "seen", or "in-error" and "starting" with the probe's words in `more`.
    - "settling": all gates hold, and have to for so many `seconds`; "hold".
    - "peer": `after` is its name; "connected", "gone", "left", "silent", "garbled", "anew".
    - "keys": of the key service; "silent", "answers" or "new-key".
    - "gpu": what gpuhealthd says; the first of its reasons, or "healthy".
    - "owner": the model owner was "asked-to-end".
    - "maintenance": "on" or "off"; `before`: "maintenance", or "asset" for an exchange of the bundle.
    - "controller": "began", "began-anew" after it died, "stopped", "socket-gone", or "stood-still" for `seconds`.
    - "disk": the run directory's is "full" or has "room".
    - "journal": "gap": some of what happened before could not be kept.
    - "given-up": somebody is needed; why.

    Attributes:
        kind: see above.
        code: a stable code: the reason, or what became of it.
        before: and `after`: for a state, the two states' names; for runtimes their instances; else what fits the kind.
        more: further codes: all gates that do not hold.
        word: an operator's own, as it was given.
        count: of requests.
        seconds: how long.
    """

    kind: str
    code: str
    before: str = ""
    after: str = ""
    more: tuple[str, ...] = ()
    word: str = ""
    count: int = 0
    seconds: float = 0.0
