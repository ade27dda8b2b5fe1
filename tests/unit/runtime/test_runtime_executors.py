"""Which executor is made, and what an operator is told where it cannot be."""

import errno
import importlib.util
import mmap
import sys

import numpy as np
import pytest

import fake_flashinfer
from executor_workload import random_weights, small_model
from tie.bones.arena import TensorEntry
from tie.bones.batch import Batch, SequenceSlice
from tie.bones.config import ModelConfig
from tie.bones.cuda import executor as cuda
from tie.bones.errors import DeviceError
from tie.bones.vision.config import VisionConfig
from tie.daemon import config as node_config
from tie.daemon.config import NodeConfig, RuntimeConfig
from tie.daemon.errors import ConfigError
from tie.daemon.layout import layout_for
from tie.runtime import executors, launch
from tie.runtime.owner_client import Weights

CUDA = RuntimeConfig(executor="cuda", kv_tokens=512, max_running=4)


@pytest.fixture(scope="module")
def model():
    return small_model("llama", 64)


@pytest.fixture(scope="module")
def weights(model):
    return packed(model)


def packed(model):
    """As the owner packs `cuda-bf16`, which is how it packs `torch-cpu-bf16`."""
    entries, content = [], bytearray()
    for name, tensor in random_weights(model, "bf16").items():
        content.extend(bytes(-len(content) % 64))
        dtype = "bf16" if tensor.dim() > 1 else "f32"
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), len(content), tensor.nbytes))
        content.extend(tensor.contiguous().flatten().view(-1).untyped_storage())
    arena = mmap.mmap(-1, len(content))
    arena[:] = bytes(content)
    return Weights("owner", 1, "model", "release", "{}", arena, tuple(entries))


@pytest.fixture
def flashinfer(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.delitem(sys.modules, "tie.bones.cuda.flashinfer", raising=False)
    yield
    sys.modules.pop("tie.bones.cuda.flashinfer", None)


def test_the_executor_for_a_gpu_is_made_of_the_configuration(model, weights, flashinfer, monkeypatch):
    """On the CPU, in a GPU's place."""
    monkeypatch.setattr(cuda, "_checked", lambda _: cuda.torch.device("cpu"))
    layout = layout_for(CUDA)
    executor = executors.make_executor(CUDA, model, weights, layout)
    assert isinstance(executor, cuda.CudaExecutor)
    assert executor.layout_id == layout == "cuda-bf16"
    assert (executor.num_blocks, executor.block_tokens) == (32, 16)
    assert executor.forward(Batch((SequenceSlice([1, 2], 0, [3], 1),))).shape == (1, model.vocab_size)


def test_without_flashinfer_the_extra_is_named(model, weights, monkeypatch):
    monkeypatch.setattr(cuda, "_checked", lambda _: cuda.torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "tie.bones.cuda.flashinfer", raising=False)
    with pytest.raises(ConfigError, match="flashinfer is not installed") as caught:
        executors.make_executor(CUDA, model, weights, "cuda-bf16")
    assert "tie-inference[cuda]" in caught.value.hint


def test_another_missing_module_is_no_matter_of_configuration(model, weights, monkeypatch):
    def broken(*_, **__):
        raise ModuleNotFoundError("No module named 'numpy.core'", name="numpy.core")

    monkeypatch.setattr(cuda, "CudaExecutor", broken)
    with pytest.raises(ModuleNotFoundError):
        executors.make_executor(CUDA, model, weights, "cuda-bf16")


def test_without_a_gpu_it_is_an_error_and_no_other_executor(model, weights, monkeypatch):
    def none(_):
        raise DeviceError("there is no GPU that PyTorch can use")

    monkeypatch.setattr(cuda, "_checked", none)
    with pytest.raises(ConfigError, match="cuda-bf16: there is no GPU"):
        executors.make_executor(CUDA, model, weights, "cuda-bf16")


@pytest.mark.parametrize(("missing", "name"), [("torch", "PyTorch"), ("flashinfer", "flashinfer")])
def test_what_is_missing_is_told_before_anything_starts(monkeypatch, tmp_path, missing, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == missing else object())
    with pytest.raises(ConfigError, match=name) as caught:
        executors.require_gpu()
    assert "tie-inference[cuda]" in caught.value.hint


def test_a_missing_device_is_told_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(executors, "_DEVICES", tmp_path)
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        executors.require_gpu()
    (tmp_path / "nvidiactl").touch()
    executors.require_gpu()


def test_a_runtime_that_cannot_have_its_gpu_leaves_nothing_behind(monkeypatch, tmp_path):
    run_dir, path = tmp_path / "run", tmp_path / "node.toml"
    path.write_bytes(node_config.dump(NodeConfig(run_dir=str(run_dir), runtime=CUDA)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="PyTorch is not installed"):
        launch.prepare(path)
    assert not run_dir.exists()


def test_ranks_that_could_not_meet_alone_are_not_started(monkeypatch, tmp_path):
    """Nothing is left behind, and the operator is told what is missing."""
    run_dir, path = tmp_path / "run", tmp_path / "node.toml"
    ranked = RuntimeConfig(tensor_parallel=2)
    path.write_bytes(node_config.dump(NodeConfig(run_dir=str(run_dir), runtime=ranked)))
    monkeypatch.setattr(launch, "own_network", lambda: False)
    with pytest.raises(ConfigError, match="a network of their own"):
        launch.prepare(path)

    def forbidden(*_, **__):
        raise OSError(errno.EAFNOSUPPORT, "no such family")

    monkeypatch.setattr(launch, "own_network", lambda: True)
    monkeypatch.setattr(launch.socket, "create_server", forbidden)
    with pytest.raises(ConfigError, match="TCP on loopback"):
        launch.prepare(path)
    assert not run_dir.exists()


@pytest.fixture(scope="module")
def seeing():
    """A model that takes images, with its weights as the owner packs them for PyTorch."""
    tower = VisionConfig(
        "pixel-shuffle", 32, 64, 1, 2, 16, 4, 1e-6, final_norm=True, scale_factor=2, connector_bias=False,
        image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5),
    )  # fmt: skip
    return ModelConfig("llama", 64, 96, 1, 4, 2, 16, 100, 64, 1e-5, 10000.0, tie_word_embeddings=True, vision=tower)


@pytest.mark.parametrize("layout", ["native-auto", "native-q4", "torch-cpu-bf16"])
def test_a_model_that_takes_images_is_pytorch_s(seeing, layout):
    executor = executors.make_executor(RuntimeConfig(kv_tokens=256), seeing, packed(seeing), layout)
    assert executor.layout_id == "torch-cpu-bf16"
    assert executor.vision.encode(np.zeros((1, 16, 16, 3), dtype=np.uint8)).shape == (1, 4, 64)


def test_a_gpu_does_not_run_it_yet(seeing):
    with pytest.raises(ConfigError, match="images"):
        executors.make_executor(CUDA, seeing, packed(seeing), "cuda-bf16")


def test_several_ranks_do_not_run_it_yet(seeing):
    with pytest.raises(ConfigError, match="one rank"):
        executors.make_executor(
            RuntimeConfig(tensor_parallel=2), seeing, packed(seeing), "torch-cpu-bf16", ranked=lambda *_: None
        )
