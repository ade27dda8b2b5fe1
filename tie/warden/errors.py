"""One error for everything that can be wrong with an entry."""

from tie.daemon.errors import TieError


class EntryError(TieError):
    """The entry does not open: another key, another model, cut, mixed, damaged. The causes are not told apart."""

    def __init__(self) -> None:
        super().__init__("the entry does not open")
