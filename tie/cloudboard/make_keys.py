"""tie-keys: makes the node's keys where they are missing, once for each boot, before anything that reads them."""

import shutil
from pathlib import Path
from typing import Final

from tie.cloudboard.keys import create_node_keys
from tie.daemon import config as node_config
from tie.daemon import log
from tie.daemon.errors import ConfigError
from tie.daemon.hardening import protect_process
from tie.daemon.service import options, refuse

_NAME: Final = "tie-keys"


def main() -> None:
    """The console script."""
    parser = options(_NAME, "Makes the node's keys where they are missing.")
    parser.add_argument("--binding-readers", metavar="GROUP", default="", help="who may read the binding key")
    parser.add_argument("--statement-readers", metavar="GROUP", default="", help="who may read the statement key")
    arguments = parser.parse_args()
    protect_process()
    try:
        config = node_config.load(arguments.config)
        create_node_keys(config)
        _give(config.sockets.binding_key, arguments.binding_readers)
        _give(config.sockets.statement_key, arguments.statement_readers)
    except Exception as error:  # noqa: BLE001 (the last line of defence)
        refuse(_NAME, error)
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
