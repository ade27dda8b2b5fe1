"""A real tie-cache-stored for each test."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tie.daemon import config as node_config
from tie.daemon.config import NodeConfig, StoreConfig
from tie.store.client import StoreClient, StoreError
from waiting import wait_for


class Store:
    """The daemon, its configuration, and clients of it."""

    def __init__(self, directory: Path, **table) -> None:
        self.config = NodeConfig(run_dir=str(directory), store=StoreConfig(**({"spare_bytes": 0} | table)))
        self.path = self.config.sockets.store
        self._toml = directory / "node.toml"
        self._toml.write_bytes(node_config.dump(self.config))
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tie.store.main", "--config", str(self._toml)]
        self.process = subprocess.Popen(command, env={**os.environ, "TIE_DUMPABLE": "1"})
        wait_for(self._serves, "the store to start")

    def _serves(self) -> bool:
        with contextlib.suppress(StoreError, FileNotFoundError):
            self.client().close()
            self.config.sockets.store_control.stat()
            return True
        return False

    def client(self, timeout: float = 10) -> StoreClient:
        return StoreClient(self.path, timeout=timeout)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(10)

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())


@pytest.fixture
def make_store():
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        stores = []

        def make(**table) -> Store:
            stores.append(Store(Path(directory), **table))
            return stores[-1]

        yield make
        for store in stores:
            if store.process.poll() is None:
                assert store.stop() == 0


@pytest.fixture
def store(make_store):
    return make_store(capacity_bytes=64 << 20, max_entry_bytes=16 << 20)
