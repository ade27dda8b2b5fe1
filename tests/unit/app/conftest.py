"""A small real bundle for the app's unit tests."""

import pytest

from tie.app.prompt import Model
from tie.assets.sample import make_sample_bundle
from tie.daemon.config import ModelConfig, NodeConfig


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    directory = tmp_path_factory.mktemp("app") / "bundle"
    make_sample_bundle(directory, context_tokens=256)
    return Model.load(NodeConfig(model=ModelConfig(bundle=str(directory))))
