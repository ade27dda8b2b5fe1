"""The exception tree of the suite, drawn once.

    TieError
    ├── UserError              an operator or user can mend it; carries a hint
    │   ├── ConfigError        node.toml is missing, malformed or impossible
    │   ├── BundleError        a model bundle is missing, malformed or fails its hashes
    │   └── RefusedError       a node or a peer answered with a refusal
    └── PeerError              another process did not do its part
        ├── PeerDiedError      the connection ended before the conversation did
        ├── PeerTimeoutError   a deadline passed
        └── ProtocolError      bytes that are no message, or a message out of order

No message of these exceptions ever contains user data: neither prompts, nor keys, nor anything that a request carried.
`kvxfer` and `tie.bones` stand alone and have small trees of their own.
"""


class TieError(Exception):
    """Base of every error that the suite raises on purpose."""


class UserError(TieError):
    """Something that the person at the keyboard can mend.

    Attributes:
        hint: what to do about it, or an empty string.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(UserError):
    """node.toml is missing, malformed or impossible."""


class BundleError(UserError):
    """A model bundle is missing, malformed or fails its hashes."""


class RefusedError(UserError):
    """A node or a peer answered with a refusal."""


class PeerError(TieError):
    """Another process did not do its part."""


class PeerDiedError(PeerError):
    """The connection ended before the conversation did."""


class PeerTimeoutError(PeerError):
    """A deadline passed while waiting for another process."""


class ProtocolError(PeerError):
    """Bytes that are no message, or a message out of order."""
