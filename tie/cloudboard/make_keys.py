"""tie-keys: makes the node's keys where they are missing, once for each boot, before anything that reads them."""

import argparse
import shutil
import sys
from pathlib import Path

from tie.cloudboard.keys import create_node_keys
from tie.daemon import config as node_config
from tie.daemon import log
from tie.daemon.errors import ConfigError, UserError
from tie.daemon.hardening import protect_process
from tie.daemon.service import EXIT_CONFIG


def main() -> None:
    """The console script."""
    parser = argparse.ArgumentParser(prog="tie-keys", description="Makes the node's keys where they are missing.")
    parser.add_argument(
        "--config", type=Path, default=Path("/etc/tie/node.toml"), help="node.toml (default: %(default)s)"
    )
    parser.add_argument("--binding-readers", metavar="GROUP", default="", help="who may read the binding key")
    parser.add_argument("--statement-readers", metavar="GROUP", default="", help="who may read the statement key")
    arguments = parser.parse_args()
    protect_process()
    try:
        config = node_config.load(arguments.config)
        create_node_keys(config)
        _give(config.sockets.binding_key, arguments.binding_readers)
        _give(config.sockets.statement_key, arguments.statement_readers)
    except UserError as error:
        sys.stderr.write(f"tie-keys: {error}\n" + (f"tie-keys: {error.hint}\n" if error.hint else ""))
        sys.exit(EXIT_CONFIG)
    log.event("keys.there")


def _give(key: Path, group: str) -> None:
    """Lets a group read a key file.

    Raises:
        ConfigError: there is no such group, or this process is not in it.
    """
    if not group:
        return
    try:
        shutil.chown(key, group=group)
        key.chmod(0o640)
    except (LookupError, OSError) as error:
        raise ConfigError(f"cannot give {key} to the group {group}: {error}") from error


if __name__ == "__main__":
    main()
