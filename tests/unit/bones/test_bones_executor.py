"""The executor on a tiny random model: order, blocks, bad batches, bad weights. The oracle tests check its numbers."""

import mmap
import os

import numpy as np
import pytest
import torch

from tie.bones.arena import TensorEntry, tensor_views
from tie.bones.attention import GatherAttention, KvPool
from tie.bones.batch import lay_out
from tie.bones.errors import BonesError, InputError, WeightsError
from tie.bones.executor import Batch, Executor, SequenceSlice
from tie.bones.llama import tensor_shapes


def _slice(tokens=(1, 2, 3), start=0, blocks=(0, 1), logits=1) -> SequenceSlice:
    return SequenceSlice(tokens=tokens, start=start, blocks=blocks, logits=logits)


def test_says_what_it_is(make_executor):
    executor = make_executor()
    assert (executor.name, executor.layout_id) == ("torch-cpu", "torch-cpu-f32")
    assert (executor.vocab_size, executor.num_blocks, executor.block_tokens) == (50, 16, 4)
    # layers * (K, V) * heads * tokens * dim * 4 bytes
    assert executor.block_bytes == 2 * 2 * 2 * 4 * 6 * 4 == len(executor.block_view(3))
    assert torch.get_num_threads() == 1


def test_logits_come_in_batch_order(make_executor):
    """Whatever order the executor works in: each slice of a mixed batch gives what it gives alone."""
    parts = {
        "prefill": [_slice((1, 2, 3, 4, 5), 0, (0, 1), 2)],
        "decode": [_slice((6, 7), 0, (2,), 0), _slice((8,), 2, (2,), 1)],
        "silent": [_slice((9, 10), 0, (3,), 0)],
        "other": [_slice((11,), 0, (4,), 1)],
    }
    alone = {}
    for name, slices in parts.items():
        executor = make_executor()
        for item in slices:
            alone[name] = executor.forward(Batch((item,)))
    executor = make_executor()
    executor.forward(Batch((parts["decode"][0],)))
    together = executor.forward(Batch(tuple(slices[-1] for slices in parts.values())))
    assert together.dtype == torch.float32
    assert torch.allclose(together, torch.cat(list(alone.values())), atol=1e-3)


def test_keys_and_values_lie_where_the_table_says(make_executor):
    """A block holds its tokens' rows over all layers, and nothing else is touched."""
    executor = make_executor()
    before = [bytes(executor.block_view(block)) for block in range(16)]
    executor.forward(Batch((_slice((1, 2, 3, 4, 5, 6), 0, (9, 5), 0),)))
    changed = {block for block in range(16) if bytes(executor.block_view(block)) != before[block]}
    assert changed == {9, 5}
    second = np.frombuffer(executor.block_view(5), dtype=np.float32).reshape(2, 2, 2, 4, 6)
    assert (second[:, :, :, :2] != 0).all()  # [layer][K, V][head][token][dim]
    assert (second[:, :, :, 2:] == 0).all()


def test_block_moved_through_its_bytes_continues_the_sequence(make_executor):
    tokens = (1, 2, 3, 4, 5)
    source = make_executor()
    expected = source.forward(Batch((_slice(tokens, 0, (0, 1), 1),)))
    target = make_executor()
    target.block_view(7)[:] = bytes(source.block_view(0))
    moved = target.forward(Batch((_slice(tokens[4:], 4, (7, 2), 1),)))
    assert torch.allclose(moved, expected, atol=1e-5)


def test_reused_block_gives_the_same_as_a_fresh_one(make_executor):
    expected = make_executor().forward(Batch((_slice(),)))
    executor = make_executor()
    for block in range(16):
        executor.block_view(block)[:] = b"\xff" * executor.block_bytes  # not a number
    assert torch.equal(executor.forward(Batch((_slice(),))), expected)


def test_sequences_may_share_blocks_that_are_only_read(make_executor):
    executor = make_executor()
    executor.forward(Batch((_slice((1, 2, 3, 4), 0, (0,), 0),)))
    both = executor.forward(Batch((_slice((5,), 4, (0, 1), 1), _slice((5,), 4, (0, 2), 1))))
    assert torch.allclose(both[0], both[1], atol=1e-6)


def test_arrays_serve_as_tokens_and_blocks(make_executor):
    expected = make_executor().forward(Batch((_slice(),)))
    arrays = _slice(np.array([1, 2, 3], dtype=np.int32), 0, np.array([0, 1], dtype=np.uint16))
    assert torch.equal(make_executor().forward(Batch((arrays,))), expected)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ((), "batch is empty"),
        ((_slice(tokens=()),), "no tokens"),
        ((_slice(tokens=(1, 50)),), "vocabulary"),
        ((_slice(tokens=(-1,)),), "vocabulary"),
        ((_slice(tokens=(1 << 80,)),), "vocabulary|whole numbers"),
        ((_slice(tokens=(1.5,)),), "whole numbers"),
        ((_slice(tokens=("a",)),), "whole numbers"),
        ((_slice(tokens=(1,) * 65, blocks=range(16)),), "context"),
        ((_slice(tokens=(1,), start=64, blocks=range(16)),), "context"),
        ((_slice(start=-1),), "context"),
        ((_slice(blocks=()),), "cover"),
        ((_slice(tokens=(1,) * 9),), "cover"),
        ((_slice(start=6),), "cover"),
        ((_slice(blocks=(0, 16)),), "pool"),
        ((_slice(blocks=(-1,)),), "pool"),
        ((_slice(logits=4),), "logits"),
        ((_slice(logits=-1),), "logits"),
        ((_slice(), _slice()), "twice"),
        ((_slice(tokens=(1,) * 8, blocks=(2, 2)),), "twice"),
    ],
)
def test_refuses_a_batch_and_changes_nothing(make_executor, slices, message):
    executor = make_executor()
    executor.forward(Batch((_slice((7, 8, 9), 0, (0, 1), 0),)))
    before = [bytes(executor.block_view(block)) for block in range(16)]
    with pytest.raises(InputError, match=message):
        executor.forward(Batch(slices))
    assert [bytes(executor.block_view(block)) for block in range(16)] == before


def test_sequence_may_fill_the_context(make_executor):
    executor = make_executor()
    executor.forward(Batch((_slice((1,) * 63, 0, range(16), 0),)))
    assert executor.forward(Batch((_slice((2,), 63, range(16), 1),))).shape == (1, 50)


@pytest.mark.parametrize("block", [-1, 16, 1 << 70])
def test_refuses_to_view_a_block_outside_the_pool(make_executor, block):
    with pytest.raises(InputError, match="pool"):
        make_executor().block_view(block)


@pytest.mark.parametrize("changes", [{"dtype": "f16"}, {"threads": 0}, {"num_blocks": 0}, {"block_tokens": 0}])
def test_refuses_impossible_arguments(make_executor, changes):
    with pytest.raises(InputError):
        make_executor(**changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "missing"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(50, 24)}), "1 tensors"),
        (lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(24, 40)}), "shape"),
        (lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(50, 24).bfloat16()}), "bfloat16"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(24, dtype=torch.int32)}), "int32"),
    ],
)
def test_refuses_weights(tiny_config, tiny_tensors, change, message):
    tensors = dict(tiny_tensors)
    change(tensors)
    with pytest.raises(WeightsError, match=message):
        Executor(tiny_config, tensors, num_blocks=1, block_tokens=4, dtype="f32", threads=1)


def test_weights_are_used_in_place(tiny_config, tiny_tensors):
    tensors = {name: tensor.clone() for name, tensor in tiny_tensors.items()}
    executor = Executor(tiny_config, tensors, num_blocks=2, block_tokens=4, dtype="f32", threads=1)
    before = executor.forward(Batch((_slice(),)))
    tensors["model.layers.0.mlp.up_proj.weight"].zero_()
    assert not torch.allclose(executor.forward(Batch((_slice(),))), before)


def test_weights_may_lie_in_a_read_only_mapping(tiny_config, tiny_tensors, make_executor):
    entries, content = [], bytearray()
    for name, tensor in tiny_tensors.items():
        content.extend(bytes(-len(content) % 64))
        entries.append(TensorEntry(name, "f32", tuple(tensor.shape), len(content), tensor.nbytes))
        content.extend(tensor.numpy().tobytes())
    descriptor = os.memfd_create("arena")
    os.write(descriptor, content)
    mapping = mmap.mmap(descriptor, len(content), access=mmap.ACCESS_READ)
    os.close(descriptor)
    tensors = tensor_views(mapping, entries)
    executor = Executor(tiny_config, tensors, num_blocks=4, block_tokens=4, dtype="f32", threads=1)
    assert torch.equal(executor.forward(Batch((_slice(),))), make_executor().forward(Batch((_slice(),))))


def test_sequences_of_like_length_share_a_call(tiny_config):
    """Decoding sequences share calls up to four times the shortest; a prefill never does."""
    pool = KvPool(tiny_config, num_blocks=64, block_tokens=4, dtype=torch.float32)
    attention = GatherAttention(tiny_config, pool)
    lengths = [63, 3, 9, 60, 2, 15, 61, 8]
    # All read the same blocks, and each writes one of its own.
    slices = [_slice((1,), length - 1, [*range(8, 8 + (length - 1) // 4), own]) for own, length in enumerate(lengths)]
    slices.insert(3, _slice((1, 2), 0, (30,)))
    rows = lay_out(Batch(tuple(slices)), tiny_config, num_blocks=64, block_tokens=4)
    groups = attention.plan(rows).groups
    assert [(group.sequences, group.queries) for group in groups] == [(5, 1), (3, 1), (1, 2)]
    assert [group.rows for group in groups] == [slice(0, 5), slice(5, 8), slice(8, 10)]


def test_bfloat16_is_close_to_float32(tiny_config, tiny_tensors, make_executor):
    tensors = {name: t.bfloat16() if t.dim() > 1 else t for name, t in tiny_tensors.items()}
    executor = Executor(tiny_config, tensors, num_blocks=4, block_tokens=4, dtype="bf16", threads=1)
    assert executor.layout_id == "torch-cpu-bf16"
    assert executor.block_bytes == make_executor().block_bytes // 2
    logits, exact = executor.forward(Batch((_slice(),))), make_executor().forward(Batch((_slice(),)))
    assert torch.nn.functional.cosine_similarity(logits, exact).item() > 0.99


def test_pool_runs_and_rows_address_the_same_bytes(tiny_config):
    """The index arithmetic of the hot loop against plain indexing."""
    pool = KvPool(tiny_config, num_blocks=5, block_tokens=4, dtype=torch.float32)
    pool.data.copy_(torch.arange(pool.data.numel(), dtype=torch.float32).view(pool.data.shape))
    for block, layer, kind, head, token in [(0, 0, 0, 0, 0), (3, 1, 0, 1, 2), (4, 1, 1, 1, 3), (2, 0, 1, 0, 1)]:
        run = block * pool.runs_per_block + kind * 2 + head
        assert torch.equal(pool.layer_runs[layer][run].view(4, 6), pool.data[block, layer, kind, head])
        assert torch.equal(pool.layer_rows[layer][run * 4 + token], pool.data[block, layer, kind, head, token])


def test_every_kind_has_its_tensors(tiny_fields):
    from tie.bones.config import ModelConfig

    def names(**changes) -> set[str]:
        shapes = tensor_shapes(ModelConfig(**(tiny_fields | changes)))
        return {
            name.removeprefix("model.layers.0.self_attn.") for name in shapes if name.startswith("model.layers.0.self")
        }

    plain = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}
    biases = {"q_proj.bias", "k_proj.bias", "v_proj.bias"}
    assert names() == plain
    assert names(kind="qwen2", attention_bias=True) == plain | biases
    assert names(kind="llama", attention_bias=True) == plain | biases | {"o_proj.bias"}
    assert names(kind="qwen3", qk_norm=True) == plain | {"q_norm.weight", "k_norm.weight"}


def test_errors_tell_nothing_of_a_request(make_executor):
    secret = _slice(tokens=(1, 4242), blocks=(0, 1))
    with pytest.raises(BonesError) as caught:
        make_executor().forward(Batch((secret,)))
    assert "4242" not in str(caught.value)
    assert "4242" not in repr(secret)


def test_copies_come_first_and_in_order(make_executor):
    """A fork goes on in a copy of a block, also where the original is written by the same batch."""
    executor = make_executor()
    executor.forward(Batch((_slice((1, 2, 3, 4, 5), 0, (0, 1), 1),)))
    original = bytes(executor.block_view(1))
    fork = Batch((_slice((7,), 5, (0, 1), 1), _slice((8,), 5, (0, 6), 1)), copies=((1, 5), (5, 6)))
    both = executor.forward(fork)
    assert bytes(executor.block_view(5)) == original
    for index, token in enumerate((7, 8)):
        alone = make_executor()
        alone.forward(Batch((_slice((1, 2, 3, 4, 5), 0, (0, 1), 0),)))
        assert torch.allclose(both[index], alone.forward(Batch((_slice((token,), 5, (0, 1), 1),)))[0], atol=1e-4)
    with pytest.raises(InputError):
        executor.forward(Batch((_slice(),), copies=((0, 16),)))
