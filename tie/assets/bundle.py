"""A bundle on disk: a directory whose manifest.json names every other file with size and SHA-256."""

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tie.assets import manifest as manifests
from tie.assets.manifest import MANIFEST_FILE, Manifest
from tie.daemon.errors import BundleError

MAX_MANIFEST_BYTES: Final = 64 * 1024 * 1024
_CHUNK: Final = 4 * 1024 * 1024

Progress = Callable[[int], None]  # is told how many more bytes are done


@dataclass(frozen=True)
class Bundle:
    """An open bundle.

    Attributes:
        directory: where it lies, itself: no link that may lead to another bundle tomorrow.
        manifest: what it says of itself.
    """

    directory: Path
    manifest: Manifest

    def path(self, name: str) -> Path:
        """Where the file `name` lies.

        Raises:
            BundleError: the bundle has no such file.
        """
        if name not in self.manifest.files:
            raise BundleError(f"{self.directory}: the bundle has no {name}")
        return self.directory / name

    def read(self, name: str) -> bytes:
        """The whole of a small file, checked against its hash.

        Raises:
            BundleError: missing, unreadable or not what the manifest says.
        """
        path = self.path(name)
        entry = self.manifest.files[name]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BundleError(f"cannot read {path}: {error.strerror}") from error
        if len(data) != entry.bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise _damaged(path)
        return data

    def verify(self, progress: Progress | None = None) -> None:
        """Hashes every file.

        Raises:
            BundleError: a file is unreadable or not what the manifest says.
        """
        for name, entry in self.manifest.files.items():
            if hash_file(self.directory / name, progress) != entry.sha256:
                raise _damaged(self.directory / name)


def open_bundle(path: Path) -> Bundle:
    """Opens a bundle: checks the manifest's shape and every file's size, not the hashes.

    A link is followed here, once: whatever is read later is of the bundle that it led to.

    Raises:
        BundleError: not a bundle, or a file is missing or has another size.
    """
    path = Path(os.path.realpath(path))
    file = path / MANIFEST_FILE
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        why = f"there is no {MANIFEST_FILE} in it" if path.is_dir() and not file.exists() else error.strerror
        raise BundleError(
            f"no model bundle at {path}: {why}", hint="`tie assets create` or `tie assets demo` makes one"
        ) from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise BundleError(f"{file}: too large for a manifest")
    try:
        manifest = manifests.decode(data)
    except msgspec.MsgspecError as error:
        raise BundleError(f"{file}: {error}", hint="make the bundle again with this version of `tie assets`") from error
    for name, entry in manifest.files.items():
        try:
            status = (path / name).lstat()
        except OSError as error:
            raise BundleError(f"{path / name}: {error.strerror}", hint="make the bundle again") from error
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.bytes:
            raise _damaged(path / name)
    return Bundle(path, manifest)


def hash_file(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        BundleError: unreadable.
    """
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while count := os.readv(descriptor, [buffer]):
                digest.update(view[:count])
                if progress is not None:
                    progress(count)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _damaged(path: Path) -> BundleError:
    return BundleError(f"{path}: not what the manifest says", hint="the bundle is damaged: make it again")
