"""How ranks begin and end, without Triton: what they must agree on, and who is told when one ends."""

import threading
from dataclasses import replace

import msgspec
import psutil
import pytest

from tie.bones.config import ModelConfig
from tie.daemon.errors import ConfigError, PeerDiedError, ProtocolError
from tie.runtime.owner_client import attach
from tie.runtime.ranks import Ranks
from waiting import wait_for

WAIT_S = 60.0
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.fixture(scope="module")
def weights(node):
    node.sockets.engine.parent.mkdir(parents=True, exist_ok=True)
    return attach(node.sockets.owner, "torch-cpu-f32", timeout=WAIT_S, progress=lambda *_: None)


@pytest.fixture
def begin(node):
    """Starts ranks, and sees to it that none is left."""
    begun = []

    def start(**runtime):
        changed = msgspec.structs.replace(node.config.runtime, executor="torch", **runtime)
        begun.append(Ranks(msgspec.structs.replace(node.config, runtime=changed)))
        return begun[-1], changed

    yield start
    for ranks in begun:
        ranks.close()
    assert processes() == []


def processes() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "tie.runtime.rank" in each.cmdline()]


def test_a_rank_with_other_weights_is_not_computed_with(begin, weights):
    ranks, runtime = begin(pipeline_parallel=2)
    model = ModelConfig.from_json(weights.config_json)
    with pytest.raises(ProtocolError, match="other weights"):
        ranks.executor(runtime, model, replace(weights, generation=weights.generation + 1))


def test_a_model_that_cannot_be_split_so_is_the_operator_s_to_mend(begin, weights):
    ranks, runtime = begin(tensor_parallel=3)
    with pytest.raises(ConfigError, match="num_heads cannot be split into 3 parts") as caught:
        ranks.executor(runtime, ModelConfig.from_json(weights.config_json), weights)
    assert "runtime.tensor_parallel" in caught.value.hint


def test_a_rank_that_ends_before_it_has_joined(begin, weights):
    ranks, runtime = begin(tensor_parallel=2)
    told = threading.Event()
    ranks.follow(told.set)
    (rank,) = processes()
    rank.kill()
    with pytest.raises(PeerDiedError):
        ranks.executor(runtime, ModelConfig.from_json(weights.config_json), weights)
    assert told.wait(WAIT_S)
    late = threading.Event()
    ranks.follow(late.set)
    assert late.is_set()
    wait_for(lambda: processes() == [])
