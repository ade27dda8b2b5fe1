"""`tie events`: what happened to the node and why, for somebody who was asleep."""

import datetime as dt
import json
from pathlib import Path

import click

from tie.cli import control, render
from tie.proto import control_pb2

# Stable codes in plain words. What is not here is shown as it is.
_WHY = {
    "ready": "everything is as it should be",
    "operator": "an operator asked for it",
    "timer": "its runtime had served as long as it may",
    "error": "something had failed (see the lines before)",
    "owner": "the model owner is another one than the runtime got its weights from",
    "asset": "the model bundle changed",
    "maintenance": "an operator switched maintenance on",
    "fresh-runtime-deadline": "no fresh runtime came up in time",
    "probe-gone": "the runtime's container is gone or does not answer",
    "runtime-in-error": "the runtime's probe says that it has failed",
    "runtime-initializing": "the runtime is still starting",
    "runtime-recycling": "the runtime is on its way out",
    "runtime-stale": "the old runtime has not gone",
    "engine-gone": "the engine's process ended",
    "canary-timeout": "test requests got no answer, and the engine computed nothing meanwhile",
    "canary-late": "test requests got no answer for long, though the engine was at work",
    "canary-failed": "a test request got no answer",
    "canary-died": "the connection to the runtime broke during a test request",
    "socket-gone": "a socket of the runtime has lost its file",
    "start-timeout": "the engine did not start in time",
    "not-warmed": "the system prompts have not been computed yet",
    "owner-gone": "the model owner does not answer",
    "owner-loading": "the model owner is loading the weights",
    "owner-failed": "the model owner could not load the weights",
    "owner-changed": "the model owner is another one than the runtime got its weights from",
    "gpuhealthd-gone": "gpuhealthd does not answer",
    "gpu-starting": "gpuhealthd has not looked at the hardware yet",
    "gpu-unavailable": "gpuhealthd calls the hardware unfit (`tie gpu`)",
    "gpu-stale": "what gpuhealthd knows of the hardware is too old",
    "cloudboard-gone": "CloudBoard does not answer",
    "settling": "it was lost several times in a row, so all has to hold for a while first",
    "away-too-long": "the node has been out of service for too long",
    "recycles-in-vain": "fresh runtimes and a fresh model owner did not help",
}
_STATES = {
    "available": "in service",
    "draining": "busy: takes no new requests, lets the running ones finish",
    "recycling": "busy: waits for a fresh runtime",
    "error": "OUT OF SERVICE",
    "maintenance": "in maintenance",
    "initializing": "starting",
}
_LETTERS = 8  # of a runtime's instance: enough to tell one from another
_STYLES = {"error": "red", "available": "green", "given-up": "red"}


def why(code: str) -> str:
    """A code in plain words."""
    return _WHY.get(code, code.replace("-", " "))


def sentence(happening: control_pb2.Happening) -> str:
    """What happened, in a sentence."""
    code, before, after = happening.code, happening.before, happening.after
    if happening.kind in {"recycle", "recycled", "runtime"}:
        before, after = before[:_LETTERS], after[:_LETTERS]
    match happening.kind:
        case "state":
            text = f"the node is {_STATES.get(after, after)}: {why(code)}"
            others = [why(other) for other in happening.more if other != code]
            return f"{text} (also: {'; '.join(others)})" if others and after == "error" else text
        case "recycle":
            return f"a recycle began, because {why(code)}" + (f"; runtime {before} is to go" if before else "")
        case "recycled":
            if code == "ok":
                return f"the recycle is done: runtime {before or '?'} is gone, {after or '?'} serves"
            return f"the recycle did not succeed: {why(code)}"
        case "runtime":
            return f"runtime {after} was seen" + (f"; before it there was {before}" if before else "")
        case "peer":
            return f"{after} {'answers' if code == 'connected' else 'does not answer any more'}"
        case "gpu":
            reasons = ", ".join(happening.more)
            return "the hardware is healthy again" if code == "healthy" else f"gpuhealthd reports: {reasons}"
        case "owner":
            return "recycles did not help: the model owner was asked to end, so that it loads the weights anew"
        case "maintenance":
            return f"maintenance was switched {code}"
        case "given-up":
            return (
                f"THE NODE GAVE UP: {why(code)}. Somebody is needed: mend what is named here, then `tie recycle`. "
                f"Now: {', '.join(map(why, happening.more)) or 'nothing is known'}"
            )
    return " ".join(filter(None, (happening.kind, code, before, after)))


@click.command()
@control.run_dir_option
@click.option("-n", "--last", type=click.IntRange(1, 256), default=30, show_default=True, help="How many.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def events(run_dir: Path, last: int, *, as_json: bool) -> int:
    """Say what happened to the node lately, and why. Newest last; survives a restart of the controller."""

    async def action() -> int:
        async with control.connected(run_dir) as connection:
            reply = await connection.node.GetEvents(control_pb2.GetEventsRequest(last=last), timeout=control.CALL_S)
        for happening in reply.happenings:
            if as_json:
                click.echo(json.dumps({**render.as_dict(happening), "sentence": sentence(happening)}))
                continue
            when = dt.datetime.fromtimestamp(happening.wall_s).astimezone()
            ago = f"{render.duration(happening.age_s)} ago"
            style = _STYLES.get(happening.after if happening.kind == "state" else happening.kind)
            click.echo(f"{when:%m-%d %H:%M:%S}  {ago:>12}  {click.style(sentence(happening), fg=style)}")
        if not reply.happenings and not as_json:
            click.echo("nothing has happened yet")
        return 0

    code: int = control.run(action)
    return code
