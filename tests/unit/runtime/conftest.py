"""Transfers of a runtime, over memory that stands for an executor's."""

import pytest

from descriptors import open_descriptors
from kv_memory import FORMAT, Memory
from kvxfer.pool import BufferPool
from tie.runtime.kv_transfer import Limits, Transfers
from waiting import wait_for


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def transfers(memory, request):
    before = open_descriptors()
    transfers = Transfers(
        FORMAT,
        memory,
        Limits(sequence_blocks=16, total_bytes=1 << 20, import_s=5, request_s=1, export_s=5),
        BufferPool(1 << 16, spare=0),
    )
    yield transfers
    wait_for(lambda: transfers.in_flight == 0)
    transfers.close()
    if "engine" not in request.fixturenames:  # that one has a helper process that comes up when it likes
        wait_for(lambda: open_descriptors() == before)
