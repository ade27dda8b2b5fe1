"""The node's key files: made once by `tie up` or the install, read by jobhelpers and the key protection service."""

import os
import secrets
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tie.daemon.config import NodeConfig
from tie.daemon.errors import ConfigError
from tie.envelope.errors import EnvelopeError
from tie.envelope.sealing import PrivateKey, PublicKey
from tie.envelope.secret import Secret

_HINT = "remove the file and start again: a new key is made (devices must then pin the new statement.pub)"


def public_path(path: Path) -> Path:
    """Where the public half of a key file is: beside it, ending in `.pub`."""
    return path.with_suffix(".pub")


def create_node_keys(config: NodeConfig) -> None:
    """Makes binding and statement keys under `run_dir/keys` where they are missing; keeps those that are there.

    Private halves get mode 0600, public ones 0644. Safe to call again at every start.

    Raises:
        ConfigError: a key file is damaged or cannot be written.
    """
    binding, statement = config.sockets.binding_key, config.sockets.statement_key
    try:
        if not binding.parent.is_dir():
            binding.parent.mkdir(parents=True, exist_ok=True)
            binding.parent.chmod(0o755)
        if not binding.exists():
            with PrivateKey.generate().raw() as raw:
                _write(binding, raw.reveal(), 0o600)
        if not statement.exists():
            with Secret(Ed25519PrivateKey.generate().private_bytes_raw()) as seed:
                _write(statement, seed.reveal(), 0o600)
        _write_public(binding, read_binding_key(config).public.raw)
        _write_public(statement, read_statement_key(config).public_key().public_bytes_raw())
    except OSError as error:
        raise ConfigError(f"cannot write the keys in {binding.parent}: {error.strerror}") from error


def read_binding_key(config: NodeConfig) -> PrivateKey:
    """The node's binding key.

    Raises:
        ConfigError: the file is missing, unreadable or damaged.
    """
    path = config.sockets.binding_key
    with _read(path) as raw:
        try:
            return PrivateKey.from_raw(raw.reveal())
        except (EnvelopeError, ValueError):
            raise ConfigError(f"{path} is not a binding key", hint=_HINT) from None


def read_binding_public(config: NodeConfig) -> PublicKey:
    """The public half of the binding key. Raises as `read_binding_key`."""
    path = public_path(config.sockets.binding_key)
    with _read(path) as raw:
        try:
            return PublicKey(bytes(raw.reveal()))
        except (EnvelopeError, ValueError):
            raise ConfigError(f"{path} is not a binding key", hint=_HINT) from None


def read_statement_key(config: NodeConfig) -> Ed25519PrivateKey:
    """The statement key. Raises as `read_binding_key`."""
    path = config.sockets.statement_key
    with _read(path) as seed:
        try:
            return Ed25519PrivateKey.from_private_bytes(bytes(seed.reveal()))
        except ValueError:
            raise ConfigError(f"{path} is not a statement key", hint=_HINT) from None


def read_statement_public(config: NodeConfig) -> bytes:
    """The public half of the statement key, raw: what devices pin. Raises as `read_binding_key`."""
    path = public_path(config.sockets.statement_key)
    with _read(path) as raw:
        if len(raw) != 32:
            raise ConfigError(f"{path} is not a statement key", hint=_HINT)
        return bytes(raw.reveal())


def _read(path: Path) -> Secret:
    try:
        return Secret(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="`tie up` and the install make the node's keys"
        ) from error


def _write_public(private: Path, data: bytes) -> None:
    # Left alone where it is right: a replaced file would leave a sandbox's bind mount on the old one.
    path = public_path(private)
    if not path.is_file() or path.read_bytes() != data:
        _write(path, data, 0o644)


def _write(path: Path, data: bytes | bytearray, mode: int) -> None:
    """Writes a whole file at once: a reader sees the old one, or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.chmod(mode)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
