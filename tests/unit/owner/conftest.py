"""A small bundle, and one that a test may damage."""

import shutil
from pathlib import Path

import pytest

from tie.assets.bundle import Bundle
from tie.assets.sample import make_sample_bundle


@pytest.fixture(scope="session")
def sample(tmp_path_factory) -> Bundle:
    return make_sample_bundle(tmp_path_factory.mktemp("sample") / "bundle", layers=2)


@pytest.fixture
def own_sample(sample, tmp_path) -> Path:
    return Path(shutil.copytree(sample.directory, tmp_path / "own"))
