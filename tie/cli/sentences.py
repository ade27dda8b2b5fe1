"""A happening in a sentence, and whether somebody has to do something about it."""

import datetime as dt

from tie.cli import render
from tie.cli.reasons import WORDS, why
from tie.proto import control_pb2

_STATES = {
    "available": "in service",
    "draining": "busy, and takes no new requests",
    "recycling": "busy, and waits for a fresh runtime",
    "error": "OUT OF SERVICE",
    "initializing": "starting",
}
_PARTS = {
    "probe": "the runtime's container",
    "gpuhealthd": "gpuhealthd, which judges the hardware,",
    "owner": "the model owner, which holds the weights,",
    "cloudboard": "CloudBoard, which brings the requests,",
    "store": "the cache store",
}
_LOST = {
    "gone": "has ended: its connection broke",
    "left": "has ended, as it was to",
    "silent": "is silent: it hangs, or was stopped",
    "garbled": "says what makes no sense",
    "connected": "answers",
}
_CONVERSATIONS = "cached conversations are gone, and their next turns are computed in full"
_NOTHING = "Nothing to do"
_RETURNS = f"{_NOTHING}: it returns by itself, or says that it gives up"
_RESTARTS = f"{_NOTHING}: it is started again by itself"
# What to do about a node that is out of service for this reason; about any other: nothing.
_TO_DO = {
    "gpu-unavailable": "`tie gpu` says what is wrong with the hardware, and what would mend it",
    "owner-failed": "The model owner's log says why: look at the bundle and at [owner] in node.toml",
}
# What gpuhealthd says of the hardware, and mends by itself.
_HEALS = frozenset({"probe-starting", "probe-gone", "recovering"})
_LETTERS = 8  # of a runtime's instance: enough to tell one from another


def sentence(happening: control_pb2.Happening) -> str:
    """What happened, how often, in an operator's words why, and what there is to do."""
    said = _said(happening) or " ".join(
        filter(None, (happening.kind, happening.code, happening.before, happening.after))
    )
    if happening.word:
        said += f' ("{happening.word}")'
    if happening.times > 1:
        since = dt.datetime.fromtimestamp(happening.first_wall_s).astimezone()
        said += f" ({happening.times} times since {since:%H:%M:%S})"
    ending = _ending(happening)
    return f"{said}. {ending}." if ending else said


def _said(happening: control_pb2.Happening) -> str:
    code, before, after = happening.code, happening.before, happening.after
    old, new, seconds = before[:_LETTERS], after[:_LETTERS], render.duration(happening.seconds)
    listed = "; ".join(WORDS.get(other, other) for other in happening.more)
    match happening.kind, code:
        case "state", _:
            return _state(happening)
        case "recycle", _:
            going = f"; runtime {old} is to go" if old else ""
            drain = f"running requests get {seconds}" if happening.seconds >= 1 else "running requests are cut"
            return f"a recycle began, because {why(code)}{going}; {drain}"
        case "joined", _:
            return "a recycle was asked for, and is the one under way"
        case "cut", _:
            many = happening.count != 1
            return (
                f"{happening.count} request{'s' * many} had not ended when the time was up: "
                f"{'their answers were' if many else 'its answer was'} cut, and the user{'s' * many} told"
            )
        case "recycled", "ok":
            return f"the recycle is done after {seconds}: runtime {old or '?'} is gone, {new or '?'} serves"
        case "recycled", _:
            return f"the recycle did not succeed: {why(code)}"
        case "runtime", "seen":
            return f"runtime {new} was seen" + (f"; before it there was {old}" if before else "")
        case "runtime", _:
            return f"runtime {new or '?'} {'has failed' if code == 'in-error' else 'does not come up yet'}: {listed}"
        case "settling", _:
            return f"all parts are well; the node is back in service in {seconds} if they stay so"
        case "peer", "anew" if after == "store":
            return f"the cache store has begun anew: {_CONVERSATIONS}"
        case "peer", _:
            return f"{_PARTS.get(after, after)} {_LOST.get(code, code)}"
        case "keys", "silent":
            return "the key service (tie-kps) does not answer: no request can be opened, users are told to try again"
        case "keys", "answers":
            return "the key service (tie-kps) answers again"
        case "keys", _:
            return "the key service (tie-kps) has a new key: it began anew, or the old one was due"
        case "gpu", _:
            return (
                "gpuhealthd calls the hardware healthy again" if code == "healthy" else f"gpuhealthd reports: {listed}"
            )
        case "owner", _:
            return "recycles did not help: the model owner was asked to end, so that it loads the weights anew"
        case "maintenance", _ if before == "asset":
            return f"`tie assets activate` {'withdraws the node' if code == 'on' else 'puts the node back in service'}"
        case "maintenance", _:
            return f"an operator switched maintenance {code}"
        case "controller", _:
            return _controller(code, seconds)
        case "disk", "full":
            return "the run directory's disk is full: daemons that start there may fail, and events may be lost"
        case "disk", _:
            return "the run directory's disk has room again"
        case "journal", _:
            return "events are missing before this line: the run directory's disk was full when the controller ended"
        case "given-up", _:
            now = ", ".join(map(why, happening.more)) or "nothing is known"
            return f"THE NODE GAVE UP: {why(code)}. Now: {now}"
    return ""


def _state(happening: control_pb2.Happening) -> str:
    after, code = happening.after, happening.code
    if after == "maintenance":
        return "the node is in maintenance, and holds nothing private any more"
    text = f"the node is {_STATES.get(after, after)}: {why(code)}"
    others = [why(other) for other in happening.more if other != code]
    if others and after == "error":
        text += f" (also: {'; '.join(others)})"
    if happening.count:
        text += f"; {happening.count} request{'s' * (happening.count != 1)} under way may have failed, told to the user"
    return text


def _controller(code: str, seconds: str) -> str:
    match code:
        case "began":
            return "the controller began"
        case "began-anew":
            return "the controller had died, and began anew; meanwhile the node took no requests"
        case "stopped":
            return "the controller was told to end"
        case "socket-gone":
            return "the controller's socket had lost its file: it ended, and another begins"
        case "stood-still":
            return (
                f"the controller itself stood still for {seconds} (it, or the machine, was stopped); it looks anew now"
            )
    return f"the controller: {code}"


def _ending(happening: control_pb2.Happening) -> str:
    reasons = set(happening.more) - {"gpu-unavailable"}
    heals = bool(reasons) and reasons <= _HEALS
    match happening.kind, happening.code:
        case "state", "gpu-unavailable" if heals and happening.after == "error":
            return _RETURNS
        case "state", code if happening.after == "error":
            return next((_TO_DO[one] for one in (code, *happening.more) if one in _TO_DO), _RETURNS)
        case "state", _ if happening.after == "maintenance":
            return "`tie maintenance off` ends it"
        case (
            ("recycled", "ok")
            | ("settling", _)
            | ("cut", _)
            | ("controller", "began-anew" | "stood-still" | "socket-gone")
        ):
            return _NOTHING
        case "recycled", _:
            return f"{_NOTHING} yet: it is tried again, later each time"
        case "runtime", code if code != "seen":
            return f"{_NOTHING} yet; if it comes again and again, look at what it says and at node.toml"
        case "peer", "gone" if happening.after == "probe":
            return f"{_RESTARTS}; which of its processes died, its log says (`container.down`)"
        case "peer", "gone" | "silent" | "garbled":
            return _RESTARTS
        case ("peer", "anew") | ("keys", "new-key" | "answers"):
            return _NOTHING
        case "keys", _:
            return f"{_NOTHING}: a watchdog ends it, and it is started again"
        case "gpu", _ if heals:
            return _RETURNS
        case "gpu", code if code != "healthy":
            return "`tie gpu` says what would mend it"
        case "maintenance", "on":
            return "`tie maintenance off` ends it" + (
                ", should it not end by itself" if happening.before == "asset" else ""
            )
        case "disk", "full":
            return "Make room there (`df`)"
        case "owner", _:
            return f"{_NOTHING} yet"
        case "given-up", _:
            return "Somebody is needed: mend what is named here, then `tie recycle`"
    return ""
