"""What commands exit with, so that scripts can tell "try again" from "never". The numbers are those of sysexits.h."""

from types import MappingProxyType
from typing import Final

from tie.daemon.errors import (
    BundleError,
    ConfigError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    RefusedError,
    TieError,
    UserError,
)

DATA: Final = 65  # EX_DATAERR
UNAVAILABLE: Final = 69  # EX_UNAVAILABLE
SOFTWARE: Final = 70  # EX_SOFTWARE
BUSY: Final = 75  # EX_TEMPFAIL
PROTOCOL: Final = 76  # EX_PROTOCOL
CONFIG: Final = 78  # EX_CONFIG, as of the daemons

# As `tie --help` shows it; README.md has the same table.
MEANINGS: Final = MappingProxyType(
    {
        0: "done",
        1: "it did not succeed, or found what should not be: the message says what",
        2: "the command line is wrong",
        3: "`tie status`: the node is not available",
        DATA: "the request is refused as it is",
        UNAVAILABLE: "no node answers, or not in time",
        SOFTWARE: "the node failed while it worked on it",
        BUSY: "the node is busy: try again",
        PROTOCOL: "the node, or its answer, cannot be trusted",
        CONFIG: "the configuration, a bundle or the installation is wrong, or no node runs here",
        130: "interrupted by Ctrl-C",
        141: "the reader of the output has left",
    }
)


def exit_code(error: TieError) -> int:
    """What a command that ends with this error exits with."""
    return next((code for kind, code in _codes() if isinstance(error, kind)), 1)


def _codes() -> tuple[tuple[type[TieError], int], ...]:
    """Error → code, the special before the general. Imported when there is an error: `tie --help` shall be quick."""
    from tie.device.errors import (
        EnvelopeRefusedError,
        NodeBusyError,
        NodeFailedError,
        RequestRefusedError,
        UnreachableError,
    )
    from tie.envelope.errors import EnvelopeError
    from tie.envelope.statement import StatementError

    return (
        (NodeBusyError, BUSY),
        (RequestRefusedError, DATA),
        (EnvelopeRefusedError, PROTOCOL),
        (StatementError, PROTOCOL),
        (EnvelopeError, PROTOCOL),
        (ConfigError, CONFIG),
        (BundleError, CONFIG),
        (RefusedError, 1),
        (UserError, DATA),  # what was given to a command, and is no request
        (UnreachableError, UNAVAILABLE),
        (PeerTimeoutError, UNAVAILABLE),
        (NodeFailedError, SOFTWARE),
        (PeerDiedError, SOFTWARE),
        (PeerError, PROTOCOL),
    )
