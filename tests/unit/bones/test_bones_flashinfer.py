"""What flashinfer's wrappers are told, with a stand-in for them that computes on the CPU what they document."""

import importlib
import sys

import pytest
import torch

import fake_flashinfer
from executor_workload import BLOCK_TOKENS, KINDS, Exact, mixed_work, random_weights, small_model
from tie.bones.cuda.executor import CudaExecutor
from tie.bones.errors import InputError

BLOCKS = 60


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """The module that imports flashinfer is made anew, and goes with the stand-in."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.delitem(sys.modules, "tie.bones.cuda.flashinfer", raising=False)
    yield importlib.import_module("tie.bones.cuda.flashinfer")
    sys.modules.pop("tie.bones.cuda.flashinfer", None)


def with_flashinfer(config, tensors, **changes):
    arguments = {"num_blocks": BLOCKS, "block_tokens": BLOCK_TOKENS, "most_decoding": 8, "device": "cpu"}
    return CudaExecutor(config, tensors, **(arguments | changes))


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tables_are_what_the_wrappers_document(kind, graphs):
    config = small_model(kind, 64)
    tensors = random_weights(config, "bf16")
    exact, executor = Exact(config, tensors, BLOCKS), with_flashinfer(config, tensors, graphs=graphs)
    for batch in mixed_work(config, BLOCKS, seed=1):
        exact.check(batch, executor.forward(batch))
    exact.check_all()


def test_heads_without_a_kernel_are_refused():
    config = small_model("llama", 8)
    with pytest.raises(InputError, match="heads"):
        with_flashinfer(config, random_weights(config, "bf16"))


def test_a_dtype_without_a_kernel_is_refused():
    config = small_model("llama", 64)
    with pytest.raises(InputError, match="bf16"):
        with_flashinfer(config, random_weights(config, "f32"), dtype="f32")


def test_without_the_package_its_name_is_in_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "tie.bones.cuda.flashinfer")
    config = small_model("llama", 64)
    with pytest.raises(ModuleNotFoundError, match="flashinfer"):
        with_flashinfer(config, random_weights(config, "bf16"))


def test_a_fixed_decoder_reads_only_its_own_memory(stand_in):
    """A replay sees no tensor of the plan's: those may be gone, or hold something else."""
    config = small_model("llama", 64)
    kernel = stand_in.FlashInfer(config, BLOCK_TOKENS, torch.bfloat16, torch.device("cpu"))
    decoder = kernel.decoder(2, 3)
    from tie.bones.cuda.numbers import PageTable

    table = PageTable(*(torch.tensor(x, dtype=torch.int32).numpy() for x in ([0, 1, 2], [0, 2, 3], [5, 16], [4, 1, 7])))
    pages = torch.from_numpy(table.pages.copy())
    decoder.update(table, pages)
    dice = torch.Generator().manual_seed(0)
    cache = torch.randn(9, 2, config.num_kv_heads, BLOCK_TOKENS, 64, generator=dice).bfloat16()
    queries = torch.randn(2, config.num_heads, 64, generator=dice).bfloat16()
    before = decoder(queries, cache)
    for array in (table.page_starts, table.last_lengths):
        array[:] = 0
    pages.zero_()
    assert torch.equal(decoder(queries, cache), before)
