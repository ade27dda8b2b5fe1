"""`tie demo`: a node from start to end, showing that a recycle reads no weights again."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from types import FrameType

import click
import psutil
from rich.console import Console
from rich.table import Table

from tie.assets.bundle import Bundle, open_bundle
from tie.cli import asking, control, evidence, settings
from tie.cli.asking import Answer
from tie.cli.assets import demo_bundle
from tie.cli.local_node import LocalNode
from tie.cli.render import size, state_word
from tie.daemon.errors import PeerError, TieError
from tie.device.client import Client
from tie.device.errors import NodeBusyError
from tie.device.request import Message
from tie.proto import control_pb2

_START_S = 180.0
_RECYCLE_S = 180.0
_QUESTIONS = (
    "In two or three sentences: why does the moon have phases?",
    "Now explain it to a child, in one sentence.",
)
_ANSWER_TOKENS = 96
_PATIENCE_S = 10.0
_LOG_LINES = 25


class DemoError(TieError):
    """The demonstration did not show what it should."""


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), help="Another model bundle [default: the demo model].")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="As for `tie up`.")
def demo(bundle: Path | None, overrides: tuple[str, ...]) -> int:
    """Start a node, ask the model, recycle the runtime, ask again, stop everything."""
    begun = time.monotonic()
    console = Console(highlight=False)
    if bundle is None:
        bundle = settings.cache_dir() / "demo-bundle"
        if not bundle.exists():
            demo_bundle(bundle)
    opened = open_bundle(bundle.absolute())
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal, for one
        signal.signal(number, _interrupt)
    with evidence.own_view(opened.directory) as view:
        node = LocalNode(bundle=view, overrides=overrides)
        code = 0
        try:
            code = _shown(node, open_bundle(view), console)
        finally:
            left = node.stop()
    if left:
        console.print(f"[red]left running, and ended now: {', '.join(left)}[/]")
    if code or left:
        return code or 1
    console.print(f"all processes have ended; {time.monotonic() - begun:.0f} s in all")
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


def _shown(node: LocalNode, bundle: Bundle, console: Console) -> int:
    """Shows it; returns the exit code."""
    try:
        _show(node, bundle, console)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # there may be no terminal any more
            console.print("\ninterrupted; stopping …")
        return 130
    except (TieError, psutil.Error, OSError) as error:
        with contextlib.suppress(OSError):
            console.print(f"\n[red]the demonstration failed:[/] {error or type(error).__name__}")
            for line in node.log_lines()[-_LOG_LINES:]:
                click.secho(line, dim=True)
        return 1
    return 0


def _show(node: LocalNode, bundle: Bundle, console: Console) -> None:
    begun = time.monotonic()
    with console.status("starting the node …"):
        asyncio.run(node.wait_for(control_pb2.STATE_AVAILABLE, _START_S))
    processes = len(node.processes())
    console.print(f"[bold]the node is available[/] after {time.monotonic() - begun:.1f} s: {processes} processes")
    target = asking.target(node.run_dir, None, None, None)
    # As an application would: with a system prompt that is registered, so that no request has to compute it.
    registered = max((prompt.text for prompt in bundle.manifest.system_prompts), key=len, default="")
    history: list[Message] = [{"role": "system", "content": registered}] if registered else []
    answers: list[Answer] = []
    with Client(target.url, target.statement_key) as client:
        answers.append(_turn(client, target.model, history, _QUESTIONS[0], console))
        recycled = _recycle(node, bundle, console)
        answers.append(_turn(client, target.model, history, _QUESTIONS[1], console))
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for heading in ("", "first token", "tokens", "tokens/s"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, answer in zip(("first answer", "after the recycle"), answers, strict=True):
        table.add_row(name, f"{answer.first_s:.2f} s", str(answer.completion_tokens), f"{answer.tokens_per_s:.1f}")
    console.print(table)
    console.print(f"the recycle took {recycled:.1f} s; stopping …")


def _turn(client: Client, model: str, history: list[Message], question: str, console: Console) -> Answer:
    console.print(f"\n[bold]» {question}[/]")
    history.append({"role": "user", "content": question})
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            answer = asking.ask(
                client,
                history,
                lambda text: console.print(text, end="", markup=False, soft_wrap=True),
                model=model,
                max_tokens=_ANSWER_TOKENS,
                temperature=0.0,
            )
            break
        except NodeBusyError:
            # The controller knows a moment before CloudBoard does that the node is back.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    console.print(f" [dim]… (cut at {_ANSWER_TOKENS} tokens)[/]\n" if answer.finish == "length" else "\n")
    if not answer.text.strip():
        raise DemoError("the answer is empty")
    history.append({"role": "assistant", "content": answer.text})
    return answer


def _recycle(node: LocalNode, bundle: Bundle, console: Console) -> float:
    """Recycles the runtime and shows from outside that it read no weights; returns the seconds it took."""
    before = asyncio.run(node.status())
    owner = _only(node, "tie-model-owner")
    files = [bundle.path(name) for name in bundle.manifest.weights]
    watch = evidence.WeightWatch(bundle.directory, bundle.manifest.weights)
    console.print("[bold]recycling the runtime[/]")
    seconds = asyncio.run(_run_recycle(node, console))
    opens, reads = watch.count()
    after = asyncio.run(node.status())
    same_owner = evidence.identity(_only(node, "tie-model-owner")) == evidence.identity(owner)
    read_since = after.owner.weight_bytes_read - before.owner.weight_bytes_read
    facts = [
        ("runtime instance", f"{before.runtime.instance_id[:8]} → {after.runtime.instance_id[:8]}",
         after.runtime.instance_id not in ("", before.runtime.instance_id)),
        ("model owner", f"process {owner.pid}, the same as before", same_owner),
        ("weights read by the owner", f"{size(after.owner.weight_bytes_read)} since its start, {read_since} bytes now",
         read_since == 0 and after.owner.loads == before.owner.loads),
        ("weight files", f"opened {opens} times, read {reads} times by any process, the new runtime included",
         opens + reads == 0),
        _mapped(node, files),
        _prefix(after),
    ]  # fmt: skip
    console.print(_checklist(facts))
    if not all(good for _, _, good in facts):
        raise DemoError("the recycle was not what it should be (see ✗ above)")
    return seconds


def _checklist(facts: list[tuple[str, str, bool]]) -> Table:
    """One line for each fact; what does not fit a narrow terminal goes on below its own beginning."""
    table = Table.grid(padding=(0, 1, 0, 0))
    for name, text, good in facts:
        table.add_row("  [green]✓[/]" if good else "  [red]✗[/]", f"{name}: {text}")
    return table


async def _run_recycle(node: LocalNode, console: Console) -> float:
    shown = -1
    request = control_pb2.RecycleRequest(reason="operator")
    async with control.connected(node.run_dir) as connection:
        async for progress in connection.node.Recycle(request, timeout=_RECYCLE_S):
            if progress.state != shown:
                shown = progress.state
                console.print(f"  {progress.elapsed_s:5.1f} s  {state_word(progress.state)}")
            if progress.finished:
                if progress.error:
                    raise DemoError(f"the recycle failed: {progress.error}")
                await node.wait_for(control_pb2.STATE_AVAILABLE, _RECYCLE_S)
                return float(progress.elapsed_s)
    raise PeerError("the controller ended the recycle's progress early")


def _prefix(status: control_pb2.NodeStatus) -> tuple[str, str, bool]:
    """What became of the registered system prompts' cache."""
    name, prefix = "system prompts' cache", status.runtime.prefix
    if prefix.state == "none":
        return name, "no registered prompt is long enough for one", True
    text = (
        f"{prefix.blocks} blocks, {size(status.owner.pool_bytes)}, mapped read-only; sealed {status.owner.pool_seals} "
    )
    text += f"time{'s' * (status.owner.pool_seals != 1)} since the owner's start"
    return name, text, prefix.restored and status.owner.pool_seals == 1


def _mapped(node: LocalNode, files: list[Path]) -> tuple[str, str, bool]:
    """What the new runtime has in its address space: the owner's memory, no weight file."""
    name = "mapped by the new runtime"
    if os.geteuid() != 0:
        return name, "not shown: only root may look into the runtime (it is not dumpable)", True
    weights = {str(file) for file in files}
    for process in node.processes():
        mapped = evidence.mapped_files(process) or set()
        if mapped & weights:
            return name, f"process {process.pid} maps a weight file", False
    runtimes = [
        (process, path)
        for process in node.find("triton_python_backend_stub")
        for path in evidence.mapped_files(process) or ()
        if path.startswith("/memfd:")
    ]
    if not runtimes:
        return name, "no memory of the owner", False
    process, path = runtimes[0]
    return name, f"{path.partition(' ')[0]} of the owner, no weight file (process {process.pid})", True


def _only(node: LocalNode, name: str) -> psutil.Process:
    found = node.find(name)
    if len(found) != 1:
        raise DemoError(f"{len(found)} processes called {name}")
    return found[0]
