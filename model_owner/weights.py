"""Which packings of the weights there are: the one loaded at start, those packed on demand, and those that failed."""

import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model_owner.arena import ArenaError
from model_owner.loader import LAYOUTS, PackedWeights, pack
from model_owner.source import CancelledError
from tie.assets.bundle import Bundle, open_bundle
from tie.assets.manifest import TENSORS_FILE
from tie.daemon import log
from tie.daemon.errors import BundleError
from tie.proto import owner_pb2

# Stable codes of what can go wrong beside an arena's own.
NO_BUNDLE: Final = "no-bundle"
BUNDLE_INVALID: Final = "bundle-invalid"
UNKNOWN_LAYOUT: Final = "unknown-layout"
STOPPING: Final = "stopping"
INTERNAL: Final = "internal"


@dataclass(frozen=True)
class Progress:
    """A packing that is under way.

    Attributes:
        done: bytes read of the weight files.
        total: bytes that they have.
    """

    done: int
    total: int


@dataclass(frozen=True)
class Failure:
    """A packing that cannot be had.

    Attributes:
        code: stable.
    """

    code: str


class Weights:
    """All packings of one bundle's weights. One thread packs, one layout at a time; any thread may ask.

    The generation names the weights that are held: all packings of one bundle share it, so that a runtime's weights are
    current exactly while its generation is the owner's.
    """

    def __init__(self, bundle: str, first_layout: str) -> None:
        """Starts packing `first_layout` at once.

        Args:
            bundle: directory; may be empty or wrong: that is a failure to report, not an exception.
            first_layout: without it the owner is of no use.
        """
        self.instance = secrets.token_hex(8)
        self._path = bundle
        self._first = first_layout
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._layouts: dict[str, PackedWeights | Progress | Failure] = {}
        self._bundle: Bundle | None = None
        self._generation = 0
        self._bundles = 1  # with other weights, so far
        self._bytes_read = 0
        self._loads = 0
        self._load_seconds = 0.0
        self._attaches = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weight-loader")
        self.get(first_layout)

    def get(self, layout_id: str) -> PackedWeights | Progress | Failure:
        """The packing, or how far it is, or why there is none. Asking for one that nobody asked for starts it."""
        if layout_id not in LAYOUTS:
            return Failure(UNKNOWN_LAYOUT)
        with self._lock:
            return self._started(layout_id)

    def follow(self) -> bool:
        """Looks which bundle is at its place now, as a runtime that attaches does; whether it is another one.

        Other prompts or another tokenizer around the same weights: what is packed stays. Other weights: what is packed
        is let go, so that never both are in memory. What had failed may not fail with this one, so it is forgotten; and
        the first layout is packed, unless it is there. A bundle that cannot be opened changes nothing: whoever attaches
        will say so.
        """
        held = self._bundle
        if not self._path or any(isinstance(item, Progress) for item in self._layouts.values()):
            return False
        try:
            found = open_bundle(Path(self._path))
        except BundleError as error:
            log.failure("owner.bundle-unreadable", error)
            return False
        if found == held:
            return False
        same_weights = held is not None and _weights_of(found) == _weights_of(held)
        with self._lock:
            packed = {name: item for name, item in self._layouts.items() if isinstance(item, PackedWeights)}
            self._layouts = {}
            if same_weights:
                self._layouts.update(packed)
            else:
                for item in packed.values():
                    item.close()
                self._bundles += held is not None
            self._bundle = found
            self._started(self._first)
        log.event("owner.bundle-changed", release=found.manifest.release, status="same" if same_weights else "other")
        return True

    def opened(self) -> Bundle:
        """The bundle that a packing came from.

        Raises:
            BundleError: none has been opened yet.
        """
        if self._bundle is None:
            raise BundleError("no bundle is open")
        return self._bundle

    def count_attach(self) -> None:
        """One more client has got its descriptors."""
        with self._lock:
            self._attaches += 1

    def status(self) -> owner_pb2.OwnerStatus:
        """A snapshot for the controller and for metrics."""
        with self._lock:
            first = self._layouts[self._first]
            packed = {name: item for name, item in self._layouts.items() if isinstance(item, PackedWeights)}
            running = [item for item in self._layouts.values() if isinstance(item, Progress)]
            status = owner_pb2.OwnerStatus(
                owner_instance=self.instance,
                generation=self._generation,
                layouts=sorted(packed),
                weight_bytes_read=self._bytes_read,
                loads=self._loads,
                load_seconds=self._load_seconds,
                arena_bytes=sum(item.arena.size for item in packed.values()),
                attaches=self._attaches,
                progress_bytes=sum(item.done for item in running),
                progress_total=sum(item.total for item in running),
            )
            match first:
                case PackedWeights():
                    status.state = owner_pb2.STATE_READY
                case Progress():
                    status.state = owner_pb2.STATE_LOADING
                case Failure(code):
                    status.state = owner_pb2.STATE_FAILED
                    status.error = code
            if self._bundle is not None:
                status.model = self._bundle.manifest.model
                status.release = self._bundle.manifest.release
            return status

    def generation(self) -> int:
        """Of the weights held; zero before the first packing is done."""
        with self._lock:
            return self._generation

    def close(self) -> None:
        """Ends a running load and gives all arenas up."""
        self._cancelled.set()
        self._worker.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for item in self._layouts.values():
                if isinstance(item, PackedWeights):
                    item.close()
            self._layouts = dict.fromkeys(self._layouts, Failure(STOPPING))

    def _started(self, layout_id: str) -> PackedWeights | Progress | Failure:
        """What there is of a layout: its packing begins here, where there is nothing. The lock is held."""
        if self._cancelled.is_set():
            return Failure(STOPPING)
        present = self._layouts.get(layout_id)
        if present is None:
            present = self._layouts[layout_id] = Progress(0, self._weight_bytes())
            self._worker.submit(self._load, layout_id)
        return present

    def _load(self, layout_id: str) -> None:
        started = time.monotonic()
        log.event("owner.loading", layout=layout_id)
        result: PackedWeights | Failure
        try:
            bundle = self._open()
            result = pack(
                bundle, layout_id, on_read=lambda count: self._advance(layout_id, count), cancelled=self._cancelled
            )
        except CancelledError:
            result = Failure(STOPPING)
        except BundleError as error:
            result = self._failure(error, NO_BUNDLE if self._bundle is None else BUNDLE_INVALID, layout_id)
        except ArenaError as error:
            result = self._failure(error, error.code, layout_id)
        except Exception as error:  # noqa: BLE001 (whatever it is, the owner stays answerable)
            result = self._failure(error, INTERNAL, layout_id)
        elapsed = time.monotonic() - started
        with self._lock:
            self._layouts[layout_id] = result
            if isinstance(result, PackedWeights):
                self._loads += 1
                self._load_seconds = elapsed
                self._generation = self._bundles
        if isinstance(result, PackedWeights):
            log.event("owner.loaded", layout=layout_id, bytes=result.arena.size, elapsed_s=round(elapsed, 3))

    def _open(self) -> Bundle:
        if self._bundle is None:
            if not self._path:
                raise BundleError("node.toml names no bundle")
            bundle = open_bundle(Path(self._path))
            with self._lock:
                self._bundle = bundle
                waiting: Mapping[str, PackedWeights | Progress | Failure] = self._layouts
                self._layouts = {
                    name: Progress(item.done, self._weight_bytes()) if isinstance(item, Progress) else item
                    for name, item in waiting.items()
                }
        return self._bundle

    def _weight_bytes(self) -> int:
        manifest = self._bundle.manifest if self._bundle else None
        return sum(manifest.files[name].bytes for name in manifest.weights) if manifest else 0

    def _advance(self, layout_id: str, count: int) -> None:
        with self._lock:
            self._bytes_read += count
            progress = self._layouts[layout_id]
            if isinstance(progress, Progress):
                self._layouts[layout_id] = Progress(progress.done + count, progress.total)

    @staticmethod
    def _failure(error: BaseException, code: str, layout_id: str) -> Failure:
        log.failure("owner.load-failed", error, code=code, layout=layout_id)
        return Failure(code)


def _weights_of(bundle: Bundle) -> object:
    """What packed weights follow from."""
    manifest = bundle.manifest
    names = (*manifest.weights, TENSORS_FILE)
    return manifest.model, manifest.architecture, manifest.weights_format, [manifest.files[name] for name in names]
