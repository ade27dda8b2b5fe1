"""Two ranks, real processes: blocks, refused batches, and a rank that dies, hangs or never comes."""

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import pytest
import torch

from rank_processes import Ranks
from tie.bones.attention import block_bytes
from tie.bones.errors import InputError, RankError
from tie.bones.executor import Batch, Executor, SequenceSlice
from tie.bones.parallel import Links
from tie.bones.split import Split

OPTIONS = {"num_blocks": 16, "block_tokens": 4, "dtype": "f32", "threads": 1}
BATCH = Batch((SequenceSlice((1, 2, 3, 4, 5), 0, (3, 7), 1),))


@pytest.fixture
def ranks():
    found = Ranks(2, 1)
    yield found
    for other in found.others:
        other.kill()
    found.close()


def test_rank_0_checks_before_anybody_computes(ranks, make_executor, tiny_config, tiny_tensors):
    executor = ranks.open(tiny_config, tiny_tensors, **OPTIONS)
    assert executor.layout_id == "torch-cpu-f32-tp2"
    assert executor.block_bytes == make_executor().block_bytes // 2
    with pytest.raises(InputError):
        executor.forward(Batch((SequenceSlice((1,), 0, (16,), 1),)))
    alone = make_executor()
    assert torch.allclose(executor.forward(BATCH), alone.forward(BATCH), atol=1e-5)
    # Its blocks are its heads' part of what one rank has: [layer][K, V][head][token][dim].
    ours = np.frombuffer(executor.block_view(3), np.float32).reshape(2, 2, 1, 4, 6)
    whole = np.frombuffer(alone.block_view(3), np.float32).reshape(2, 2, 2, 4, 6)
    assert np.allclose(ours, whole[:, :, :1], atol=1e-5)
    copied = Batch((SequenceSlice((9,), 5, (3, 8), 1),), copies=((7, 8),))
    assert torch.allclose(executor.forward(copied), alone.forward(copied), atol=1e-5)


def test_bfloat16_is_as_exact_as_on_one_rank(ranks, make_executor, tiny_config, tiny_tensors):
    """What the shards have computed is rounded once, and summed in float32."""
    tensors = {name: t.bfloat16() if t.dim() > 1 else t for name, t in tiny_tensors.items()}
    options = OPTIONS | {"dtype": "bf16"}
    exact = make_executor().forward(BATCH)
    one = Executor(tiny_config, tensors, **options).forward(BATCH)
    two = ranks.open(tiny_config, tensors, **options).forward(BATCH)
    assert (two - exact).norm() < 2 * (one - exact).norm()


def test_a_rank_that_hangs_is_an_error_and_so_is_one_that_dies(ranks, tiny_config, tiny_tensors):
    executor = ranks.open(tiny_config, tiny_tensors, timeout=8.0, **OPTIONS)  # in which they have to meet as well
    executor.forward(BATCH)
    (other,) = ranks.others
    other.send_signal(signal.SIGSTOP)
    before = time.monotonic()
    with pytest.raises(RankError):
        executor.forward(BATCH)
    assert time.monotonic() - before < 60
    other.send_signal(signal.SIGCONT)
    other.kill()
    other.wait()
    with pytest.raises((RankError, BrokenPipeError)):
        executor.forward(BATCH)


def test_ranks_that_never_come(tmp_path):
    with pytest.raises(RankError):
        Links(Split(2), timeout=1.0).meet(tmp_path / "meeting")


@pytest.mark.parametrize("split", [Split(), Split(2), Split(1, 2, 1)])
def test_a_pool_in_somebody_s_memory(make_executor, tiny_config, tiny_tensors, split):
    part = split.config(tiny_config)
    size = 16 * block_bytes(part, 4, torch.float32)
    memory = memoryview(bytearray(size))
    executor = make_executor(memory=memory, split=split, reduce=lambda x: x)
    assert executor.block_bytes * 16 == size
    executor.block_view(5)[:4] = b"here"
    assert memory[5 * executor.block_bytes :][:4] == b"here"


def test_nobody_has_met_before_all_have(tmp_path):
    """Who is through takes the file away: one that is still about to read it would look for it for ever."""
    first: Future[None]

    class Late(Links):
        def _group(self, *arguments):
            group = super()._group(*arguments)
            self.alone = not wait([first], timeout=0.5).done
            return group

    late = Late(Split(2, 1, 1), timeout=20.0)
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(Links(Split(2), timeout=20.0).meet, tmp_path / "meeting")
        late.meet(tmp_path / "meeting")
        first.result(20)
    assert late.alone
