"""`tie proxy`: OpenAI's API on this machine; what is asked and answered leaves it sealed, and stays in memory."""

import asyncio
import signal
import socket
from pathlib import Path

import click

from tie.cli import asking, settings
from tie.daemon.errors import ConfigError
from tie.daemon.hardening import protect_process
from tie.device.async_client import AsyncClient
from tie.device.proxy.access import LOOPBACK, Access
from tie.device.proxy.handler import Settings
from tie.device.proxy.models import Models
from tie.device.proxy.service import serve
from tie.device.turns import Turns
from tie.http.listening import listen

_MIN_KEY_BYTES = 16


@click.command(context_settings={"show_default": True})
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=settings.default_run_dir,
    show_default="$TIE_RUN_DIR or /run/tie",
    help="The node's.",
)
@click.option("--url", "urls", multiple=True, help="A node's ingress; may be repeated [default: the local node's].")
@click.option("--statement-key", type=click.Path(path_type=Path), help="The fleet's statement.pub [default: local].")
@click.option("--model", "models", multiple=True, help="Model id; may be repeated [default: the local node's].")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8444, help="Port to listen on.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="Ask clients for the key in this file.")
@click.option("--gather-ms", type=click.IntRange(0, 5000), default=0, help="Put pieces of a stream together so long.")
@click.option("--turn-keys/--no-turn-keys", default=True, help="Let nodes reuse earlier turns of conversations.")
def proxy(
    *,
    run_dir: Path,
    urls: tuple[str, ...],
    statement_key: Path | None,
    models: tuple[str, ...],
    host: str,
    port: int,
    api_key_file: Path | None,
    gather_ms: int,
    turn_keys: bool,
) -> int:
    """Serve OpenAI's API on this machine: /v1/chat/completions, /v1/completions, /v1/models.

    Every request is sealed to a node whose key statement has been verified; text is readable on this machine and in
    the process that serves the request, nowhere between. docs/proxy.md says what is supported.
    """
    target = asking.target(run_dir, next(iter(urls), None), statement_key, next(iter(models), None))
    access = Access(api_key=_read_key(api_key_file), local=host in LOOPBACK)
    if not access.local and not access.api_key:
        raise ConfigError(
            f"{host} is not this machine's own address: whoever reaches it could ask", hint="add --api-key-file"
        )
    named = models or (target.model,)
    chosen = Settings(
        models=Models(named, None if models else lambda: (asking.local_model(run_dir),)),
        access=access,
        gather_s=gather_ms / 1000,
        turns=Turns() if turn_keys else None,
    )
    client = AsyncClient(urls or target.url, target.statement_key)
    with listen(host, port, hint="choose another one: tie proxy --port 9444") as listening:
        protect_process()  # what is asked and answered is in its memory
        name = f"[{host}]" if ":" in host else host
        click.echo(f"OpenAI's API is on http://{name}:{listening.getsockname()[1]}/v1 for {', '.join(named)}")
        asyncio.run(_serve(client, chosen, listening))
    return 0


async def _serve(client: AsyncClient, settings: Settings, listening: socket.socket) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    await serve(client, settings, listening, stopping)


def _read_key(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the API key {path}: {error.strerror}") from error
    if len(key) < _MIN_KEY_BYTES or not key.isascii() or len(key.split()) != 1:
        raise ConfigError(
            "the API key must be one word of 16 characters or more", hint="for example: openssl rand -hex 24"
        )
    return key
