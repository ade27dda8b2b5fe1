"""Which part of a model a rank has: everything once, nothing copied."""

import dataclasses

import pytest
import torch

from tie.bones.config import ModelConfig
from tie.bones.errors import ConfigError
from tie.bones.llama import tensor_shapes
from tie.bones.split import ALONE, Split

SHAPE = {
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 51,
    "attention_bias": True,
    "tie_word_embeddings": True,
}


@pytest.fixture
def whole(tiny_config) -> ModelConfig:
    return dataclasses.replace(tiny_config, **SHAPE)


@pytest.fixture
def tensors(whole) -> dict[str, torch.Tensor]:
    """Every value is another."""
    found, start = {}, 0
    for name, shape in tensor_shapes(whole).items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(start, start + count, dtype=torch.float64).view(shape)
        start += count
    return found


def _ranks(tensor: int, pipeline: int) -> list[Split]:
    return [Split(tensor, pipeline, rank) for rank in range(tensor * pipeline)]


def test_places():
    places = [(each.stage, each.shard, each.is_last) for each in _ranks(2, 2)]
    assert places == [(0, 0, False), (0, 1, False), (1, 0, True), (1, 1, True)]
    assert [split.suffix for split in (ALONE, Split(2), Split(1, 2), Split(2, 4))] == ["", "-tp2", "-pp2", "-tp2-pp4"]
    assert Split(2, 2).of(3) == Split(2, 2, 3)


@pytest.mark.parametrize("numbers", [(0, 1, 0), (1, 0, 0), (2, 2, 4), (2, 2, -1), (65, 1, 0), (8, 9, 0)])
def test_impossible_places(numbers):
    with pytest.raises(ConfigError):
        Split(*numbers)


@pytest.mark.parametrize("split", [(2, 1), (1, 2), (1, 3), (2, 2)])
def test_every_value_is_somewhere_and_of_a_layer_once(whole, tensors, split):
    counts: dict[float, int] = {}
    for rank in _ranks(*split):
        for name, view in rank.tensors(whole, tensors).items():
            if name.startswith("model.layers.") and (view.dim() > 1 or "bias" in name):
                for value in view.flatten().tolist():
                    counts[value] = counts.get(value, 0) + 1
    cut = [tensor for name, tensor in tensors.items() if name.startswith("model.layers.") and "norm" not in name]
    assert counts == {value: 1 for tensor in cut for value in tensor.flatten().tolist()}


@pytest.mark.parametrize("split", [(2, 1), (1, 3), (2, 2)])
def test_a_part_has_its_shape_and_no_memory_of_its_own(whole, tensors, split):
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    for rank in _ranks(*split):
        part = rank.config(whole)
        views = rank.tensors(whole, tensors)
        assert all(view.untyped_storage().data_ptr() in storages for view in views.values())
        shapes = tensor_shapes(part)
        head = views["lm_head.weight"]
        assert torch.equal(head, tensors["model.embed_tokens.weight"][rank.columns(whole)])
        missing = shapes.keys() - views.keys()
        assert all("o_proj.bias" in name for name in missing)
        assert bool(missing) == (rank.shard > 0)
        for name in shapes.keys() & views.keys() - {"lm_head.weight"}:
            assert tuple(views[name].shape) == shapes[name], name


def test_columns_cover_the_vocabulary(whole):
    columns = [Split(2).columns(whole, shard) for shard in range(2)]
    assert columns == [slice(0, 25), slice(25, 51)]


def test_one_rank_has_the_model_as_it_is(whole, tensors):
    assert ALONE.config(whole) is whole
    assert ALONE.tensors(whole, tensors) is tensors


@pytest.mark.parametrize(
    ("split", "changes"),
    [
        (Split(2), {"num_heads": 3, "num_kv_heads": 3}),
        (Split(4), {}),
        (Split(2), {"intermediate_size": 41}),
        (Split(1, 4), {}),
    ],
)
def test_models_that_cannot_be_split_so(whole, split, changes):
    with pytest.raises(ConfigError):
        split.config(dataclasses.replace(whole, **changes))
