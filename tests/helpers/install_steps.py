"""A step of an installation that fails, and nobody to tell."""

from tie.daemon.errors import ConfigError


class Fails:
    says = "what fails"

    def do(self) -> None:
        raise ConfigError("on purpose")

    def undo(self) -> None:
        """Nothing was done."""


def quietly(text: str) -> None:
    del text
