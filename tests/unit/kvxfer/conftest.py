"""A buffer, and the two ends of a channel."""

import os

import pytest

from descriptors import open_descriptors
from kvxfer import seals
from kvxfer.channel import Channel
from kvxfer_blocks import HEADER


@pytest.fixture
def memfd():
    descriptor = seals.create("test", HEADER.buffer_bytes)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def ends():
    before = open_descriptors()
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()
    assert open_descriptors() == before
