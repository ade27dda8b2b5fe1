"""An attach server inside this process, for tests of prefix pools."""

import asyncio
import os
import tempfile
import threading
from pathlib import Path

import pytest

from model_owner.prefix_pool import PrefixPools
from model_owner.server import AttachServer
from model_owner.weights import Weights
from tie.assets.sample import make_sample_bundle

WAIT_S = 30.0
POOL_BYTES = 1 << 20


class PoolOwner:
    """An attach server on a thread of its own. Its pools may be looked at, and spoilt, from the test's."""

    def __init__(self, bundle: Path, directory: Path) -> None:
        self.path = directory / "o.sock"
        self.pools = PrefixPools(POOL_BYTES)
        self._weights = Weights(str(bundle), "torch-cpu-f32")
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._up.wait(WAIT_S)

    async def _serve(self) -> None:
        async with AttachServer(self._weights, self.pools, {os.geteuid()}).serve(self.path):
            self._up.set()
            await self._stop.wait()

    def close(self) -> None:
        """Ends it, as if it died. A second time does nothing."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(WAIT_S)
            self._loop.close()
            self.pools.reset()
            self._weights.close()


@pytest.fixture(scope="session")
def pool_bundle(tmp_path_factory):
    return make_sample_bundle(tmp_path_factory.mktemp("pool") / "bundle").directory


@pytest.fixture
def pool_owner(pool_bundle):
    with tempfile.TemporaryDirectory(prefix="own") as directory:
        owner = PoolOwner(pool_bundle, Path(directory))
        yield owner
        owner.close()


@pytest.fixture
def path(pool_owner):
    return pool_owner.path
