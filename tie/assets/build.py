"""Makes a bundle out of a model's source: hashes, manifest, and a directory that appears whole or not at all."""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tie.assets import manifest as manifests
from tie.assets.bundle import Bundle, Progress, hash_file, open_bundle
from tie.assets.chat import ChatError, ChatMessage, ChatTemplate
from tie.assets.manifest import (
    CHAT_TEMPLATE_FILE,
    MANIFEST_FILE,
    TENSORS_FILE,
    TOKENIZER_FILE,
    FileEntry,
    Manifest,
    SystemPrompt,
)
from tie.assets.prefix import common_length
from tie.assets.source import ModelSource
from tie.assets.tensors import TensorIndex, check_tensors
from tie.assets.tokenizer import Tokenizer
from tie.daemon.errors import BundleError

_WEIGHTS: Final = frozenset({".gguf", ".safetensors"})
_FICLONE: Final = 0x40049409  # ioctl_ficlone(2)
# How a file system, a sandbox or a kernel says that it cannot share blocks between these two files.
_CANNOT_CLONE: Final = frozenset(
    {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.ENOSYS, errno.EBADF}
)


class BundleExistsError(BundleError):
    """Another bundle, or something that is none, lies where the new one should go."""


def read_source(path: Path) -> ModelSource:
    """A model from a .gguf file, a Hugging Face directory, or another bundle.

    Raises:
        BundleError: neither, or not supported.
    """
    # Each format's libraries only where it is used.
    if (path / MANIFEST_FILE).is_file():
        from tie.assets.bundle_reader import read_bundle

        return read_bundle(path)
    if path.is_dir():
        from tie.assets.safetensors_reader import read_directory

        return read_directory(path)
    from tie.assets.gguf_reader import read_gguf

    return read_gguf(path)


def create_bundle(
    source: ModelSource,
    destination: Path,
    *,
    model: str = "",
    release: str = "",
    system_prompts: Mapping[str, str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Makes the bundle `destination`.

    Args:
        source: the model.
        destination: a directory that does not exist yet, is empty, or holds the same bundle.
        model: its id; default: made from the source's name.
        release: default: made from the content's hashes.
        system_prompts: texts to register, by name.
        force: replace a bundle that is there, also a damaged one. Nothing else is ever replaced.
        progress: is told of weight bytes done; each is counted three times: hashed, placed, verified.

    Returns:
        The bundle; the existing one when it is the same and whole.

    Raises:
        BundleExistsError: something else is there, or another bundle and `force` is false.
        BundleError: the model is inconsistent, or cannot be read or written.
    """
    check_tensors(source.architecture, source.tensors, {name: _size(path) for name, path in source.weights.items()})
    texts = {
        TOKENIZER_FILE: source.tokenizer_json,
        TENSORS_FILE: msgspec.json.encode(TensorIndex(tensors=source.tensors)),
    }
    if source.chat_template is not None:
        texts[CHAT_TEMPLATE_FILE] = source.chat_template.encode()
    files = {
        name: FileEntry(sha256=hash_file(path, progress), bytes=_size(path)) for name, path in source.weights.items()
    }
    files |= {name: FileEntry(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data)) for name, data in texts.items()}
    draft = Manifest(
        model=model or source.name,
        release=release or "draft",
        architecture=source.architecture,
        files=files,
        weights=tuple(source.weights),
        weights_format=source.weights_format,
        tokenizer=source.tokenizer,
        system_prompts=_register(source, system_prompts or {}),
        images=source.images,
    )
    if not release:
        draft = msgspec.structs.replace(draft, release=_digest(manifests.encode(draft))[:12])
    encoded = manifests.encode(draft)
    try:
        manifests.decode(encoded)  # structs check nothing when they are made in Python
    except msgspec.MsgspecError as error:
        raise BundleError(f"no bundle can be made of this: {error}") from error
    if destination.exists() or destination.is_symlink():
        existing = _existing(destination, encoded)
        if existing is not None:
            existing.verify(progress)
            return existing
        if not _replaceable(destination):
            raise BundleExistsError(f"{destination} exists and is no bundle", hint="choose another place")
        if not force and any(destination.iterdir()):
            raise BundleExistsError(
                f"{destination} exists and is another bundle", hint="choose another place, or use --force"
            )
    _write(destination, texts | {MANIFEST_FILE: encoded}, source.weights, progress)
    return open_bundle(destination)


def _register(source: ModelSource, prompts: Mapping[str, str]) -> tuple[SystemPrompt, ...]:
    if not prompts:
        return ()
    if source.chat_template is None:
        raise BundleError("system prompts need a chat template, and this model has none")
    template = ChatTemplate(source.chat_template, Tokenizer.from_json(source.tokenizer_json), source.tokenizer)
    return tuple(
        SystemPrompt(name=name, text=text, token_ids=_system_prefix(template, text)) for name, text in prompts.items()
    )


def _system_prefix(template: ChatTemplate, text: str) -> tuple[int, ...]:
    """Token ids that every conversation with this system prompt begins with."""
    system = ChatMessage(role="system", content=text)

    def render(*more: ChatMessage) -> list[int]:
        return template.encode([system, *more], add_generation_prompt=False)

    common = _common_prefix(*(render(ChatMessage(role="user", content=content)) for content in ("a", "0")))
    try:
        alone = render()
    except ChatError:
        return common  # some templates want a user's message
    return _common_prefix(alone, common)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    return tuple(left[: common_length(left, right)])


def _existing(destination: Path, encoded: bytes) -> Bundle | None:
    """The bundle at `destination` when its manifest is `encoded` and its files are there."""
    try:
        existing = open_bundle(destination)
    except BundleError:
        return None
    return existing if manifests.encode(existing.manifest) == encoded else None


def _replaceable(destination: Path) -> bool:
    """Whether nothing but a bundle, whole or damaged, would be lost with `destination`."""
    try:
        entries = list(destination.iterdir())
    except OSError:
        return False
    mine = {MANIFEST_FILE, TOKENIZER_FILE, TENSORS_FILE, CHAT_TEMPLATE_FILE}
    return not entries or (
        any(entry.name == MANIFEST_FILE for entry in entries)
        and all(entry.is_file() and (entry.name in mine or entry.suffix in _WEIGHTS) for entry in entries)
    )


def _write(
    destination: Path, texts: Mapping[str, bytes], weights: Mapping[str, Path], progress: Progress | None
) -> None:
    parent = destination.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=parent) as name:
            staged = Path(name) / "new"
            staged.mkdir()
            for file, data in texts.items():
                (staged / file).write_bytes(data)
            for file, source in weights.items():
                _place(source, staged / file, progress)
            # What was placed, not what was read before: a source that changed meanwhile makes no bundle.
            open_bundle(staged).verify(progress)
            if destination.exists() or destination.is_symlink():
                destination.rename(Path(name) / "old")
            staged.rename(destination)
    except OSError as error:
        raise BundleError(f"cannot write {destination}: {error.strerror}") from error


def _place(source: Path, destination: Path, progress: Progress | None) -> None:
    """Shares the source's blocks where the file system can, links where that is harmless, else copies."""
    size = _size(source)
    if not (_clone(source, destination) or _link(source, destination)):
        with source.open("rb") as reading, destination.open("xb") as writing:
            shutil.copyfileobj(reading, writing, 4 * 1024 * 1024)
    if progress is not None:
        progress(size)


def _clone(source: Path, destination: Path) -> bool:
    with source.open("rb") as reading, destination.open("xb") as writing:
        try:
            fcntl.ioctl(writing, _FICLONE, reading.fileno())
        except OSError as error:
            if error.errno not in {
                errno.EOPNOTSUPP,
                errno.EXDEV,
                errno.EINVAL,
                errno.ENOTTY,
                errno.EPERM,
                errno.ENOSYS,
            }:
                raise
        else:
            return True
    destination.unlink()
    return False


def _link(source: Path, destination: Path) -> bool:
    # A link keeps the source's mode and owner: only where every daemon can read it, and nobody but its owner writes it.
    status = source.stat()
    if not status.st_mode & stat.S_IROTH or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    with contextlib.suppress(OSError):
        os.link(source.resolve(), destination)
        return True
    return False


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error
