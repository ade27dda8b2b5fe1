"""`tie up`: the whole node in one terminal, without systemd. The same daemons, sockets and per-connection start."""

import asyncio
import os
import signal
import time
from pathlib import Path

import click

from tie.cli import prepare, settings
from tie.cli.console import Console
from tie.cli.listener import Listener, keep_open
from tie.cli.process import OnLine, kill_orphans
from tie.cli.supervisor import Report, Service, ServiceConfigError, describe_exit, stop_in_order
from tie.daemon.config import NodeConfig
from tie.daemon.errors import ConfigError
from tie.daemon.hardening import adopt_orphans, die_with_parent
from tie.daemon.notify import notify

# In the order of their start. They may as well start all at once: each waits for its peers.
_DAEMONS = (
    ("tie-kps", 3.0),
    ("gpuhealthd", 3.0),
    ("tie-cache-stored", 3.0),
    ("tie-model-owner", 3.0),
    ("tie-afm-runtime", 15.0),
    ("tie-cloudboard", 5.0),
    ("tie-controllerd", 5.0),
)
# And of their end: first nobody sends anything more, then what works for requests, then what they stand on.
_STOP_STAGES = (
    ("tie-controllerd", "tie-cloudboard"),
    ("tie-afm-runtime",),
    ("gpuhealthd", "tie-cache-stored", "tie-model-owner", "tie-kps"),
)
_INSTANCE_STOP_S = 3.0
_ORPHANS_S = 5.0
_MAX_APPS = 64
_MAX_JOBHELPERS = 300
# Each process of a request has one thread's worth of work: libraries that start a pool per core only lose time.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), help="Model bundle to serve [default: the demo model].")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Sockets and keys [default: the file's, $TIE_RUN_DIR or /run/tie].",
)
@click.option("--port", type=click.IntRange(1, 65535), help="Port of CloudBoard's ingress on loopback [default: 8443].")
@click.option("--config", "base", type=click.Path(path_type=Path), help="A node.toml to start from.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one setting; may be repeated.")
@click.option("--quiet", is_flag=True, help="Only this command's own messages, no logs.")
@click.option("--json-logs", is_flag=True, help="Logs as JSON lines.")
@click.option("--parent", type=int, hidden=True, help="Stop when this process, which started us, has ended.")
def up(
    bundle: Path | None,
    run_dir: Path | None,
    port: int | None,
    base: Path | None,
    overrides: tuple[str, ...],
    *,
    quiet: bool,
    json_logs: bool,
    parent: int | None,
) -> int:
    """Run a whole node in this terminal, until Ctrl-C.

    Starts every daemon, gives each request its own processes, starts again what ends. No process, key or socket
    outlives this command.
    """
    console = Console(quiet=quiet, json_logs=json_logs)
    chosen = None if run_dir is None else str(run_dir)
    config = settings.effective(
        base,
        overrides,
        run_dir_unless_named=settings.default_run_dir(),
        run_dir=chosen,
        cloudboard__port=port,
        model__bundle=None if bundle is None else str(bundle),
    )
    directory = Path(config.run_dir).absolute()
    config = settings.replace(config, run_dir=str(directory))
    with prepare.prepared(directory):
        prepare.check(config)
        config = prepare.with_bundle(config, console)
        prepare.write_configuration(config)
        prepare.compile_packages()
        return asyncio.run(_Node(config, console).run(parent))


class _Node:
    """All processes of one node."""

    def __init__(self, config: NodeConfig, console: Console) -> None:
        self._config = config
        self._console = console
        self._directory = Path(config.run_dir)
        self._stopping = asyncio.Event()
        self._state = ""
        toml = str(settings.node_toml(self._directory))
        self._services = {
            name: Service(name, [prepare.program(name), "--config", toml], stop_s) for name, stop_s in _DAEMONS
        }
        environment = {key: value for key, value in os.environ.items() if key not in ("NOTIFY_SOCKET", "WATCHDOG_USEC")}
        self._environment = {**environment, "PYTHONUNBUFFERED": "1"}
        sockets = config.sockets
        self._listeners = [
            Listener(
                name,
                path,
                [prepare.program(name), "--config", toml],
                environment={**self._environment, **_ONE_THREAD},
                limit=limit,
                on_line=self._log_to,
                on_refused=lambda name: console.log(name, "connection refused: too many instances"),
            )
            for name, path, limit in (
                ("tie-cloud-app", sockets.app, _MAX_APPS),
                ("cb_jobhelper", sockets.jobhelper, _MAX_JOBHELPERS),
            )
        ]

    async def run(self, parent: int | None) -> int:
        """Runs the node until a signal, or until `parent` ends; returns the exit code."""
        loop = asyncio.get_running_loop()
        adopt_orphans()
        loop.add_signal_handler(signal.SIGCHLD, self._sweep)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        if parent is not None:
            die_with_parent(signal.SIGTERM)
            if os.getppid() != parent:  # it ended before that reached the kernel
                self._stopping.set()
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            for listener in self._listeners:
                listener.start()
            for name, service in self._services.items():
                running = service.run(self._environment, self._directory, self._report(service))
                tasks[name] = asyncio.create_task(running, name=name)
            healing = asyncio.create_task(keep_open(self._listeners, self._console.log), name="healing")
            try:
                return await self._until_stopped([healing, *tasks.values()])
            finally:
                healing.cancel()
        finally:
            notify("STOPPING=1")
            self._console.say("stopping … (once more: at once)")
            first, *others = ([tasks[name] for name in stage if name in tasks] for stage in _STOP_STAGES)
            await stop_in_order([first])
            await asyncio.gather(*(listener.stop(_INSTANCE_STOP_S) for listener in self._listeners))
            await stop_in_order(others)
            await self._end_orphans()
            self._console.say("stopped")

    async def _until_stopped(self, tasks: list[asyncio.Task[None]]) -> int:
        """Waits for the wish to stop; an error of any of the tasks, which all run for ever, ends the node."""
        stopping = asyncio.create_task(self._stopping.wait())
        done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in done - {stopping}:
            error = task.exception()
            if isinstance(error, ServiceConfigError):
                lines = self._services[task.get_name()].last_lines
                raise ConfigError(f"{error}: {lines[-1] if lines else ''}") from error
            if error is not None:
                raise error
        return 0

    def _report(self, service: Service) -> Report:
        def ended(code: int, pause: float) -> None:
            if self._stopping.is_set():
                return
            self._console.log(service.name, f"ended with {describe_exit(code)}; starts again in {pause:g} s")
            if code not in (0, -signal.SIGKILL, -signal.SIGTERM) and pause > 1:
                self._console.say(f"{service.name} keeps failing ({describe_exit(code)}):", error=True)
                for line in list(service.last_lines)[-5:]:
                    self._console.say(f"    {line}", error=True)

        return Report(
            line=self._log_to(service.name),
            ready=lambda: None,  # its own log says so
            status=self._on_status if service.name == "tie-controllerd" else lambda _: None,
            ended=ended,
        )

    def _log_to(self, name: str) -> OnLine:
        return lambda line: self._console.log(name, line)

    def _on_status(self, text: str) -> None:
        """The controller's state, in its words: the first one is the state's name."""
        state = text.partition(" ")[0]
        if state == self._state:
            return
        self._state = state
        if state == "available":
            notify("READY=1")
            cloudboard = self._config.cloudboard
            self._console.say(f"the node is available on http://{cloudboard.host}:{cloudboard.port}: try `tie chat`")
        else:
            self._console.say(f"the node is {text}")

    def _on_signal(self) -> None:
        if self._stopping.is_set():  # asked twice: at once
            for service in self._services.values():
                if service.child is not None:
                    service.child.kill()
            for listener in self._listeners:
                listener.kill()
        self._stopping.set()

    async def _end_orphans(self) -> None:
        """Waits for what the daemons left behind: a large process takes a moment to go."""
        deadline = time.monotonic() + _ORPHANS_S
        while kill_orphans(set()) and time.monotonic() < deadline:  # noqa: ASYNC110 (the kernel has no event for it)
            await asyncio.sleep(0.02)

    def _sweep(self) -> None:
        known = {service.child.pid for service in self._services.values() if service.child is not None}
        kill_orphans(known.union(*(listener.pids for listener in self._listeners)))
