"""Which bundle a node serves: a symbolic link that `model.bundle` names, and that is replaced as a whole.

A process that opens the link finds one bundle or the other, never a mixture, and stays with what it found. Processes
that began with the old one are told apart by its release: an app refuses a runtime of another, and a runtime refuses
such weights and prefixes.
"""

import contextlib
import os
import secrets
from pathlib import Path

from tie.assets.bundle import Bundle, open_bundle
from tie.daemon.errors import BundleError

LINK = "active"


def point(link: Path, bundle: Path) -> Bundle:
    """Makes `link` point to `bundle`, atomically.

    Args:
        link: to be made, or replaced; nothing but a link ever is.
        bundle: where it is. `link` leads to the directory itself: a link, even `link`, may lead elsewhere later.

    Raises:
        BundleError: there is no bundle, or something else where the link should be, or it cannot be written.
    """
    opened = open_bundle(bundle)
    if link.exists() and not link.is_symlink():
        raise BundleError(
            f"{link} is not a link, so this node's bundle cannot be exchanged",
            hint="let model.bundle name a link to the bundle, and start the node again",
        )
    fresh = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        fresh.symlink_to(opened.directory)
        os.replace(fresh, link)  # noqa: PTH105 (Path.rename says nothing of replacing)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise BundleError(f"cannot write {link}: {error.strerror}") from error
    return opened
