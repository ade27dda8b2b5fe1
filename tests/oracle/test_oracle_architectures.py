"""bones against transformers on small random models of every supported kind, in float32."""

import random

import pytest
import torch

from oracle_models import CASES, Case, greedy
from tie.bones.executor import Executor

pytestmark = pytest.mark.oracle

TOLERANCE = 3e-4
"""Of logits as large as 13. Measured differences are below 1e-4; what is promised is 1e-3."""


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


@pytest.fixture
def executor(case: Case) -> Executor:
    executor = Executor(case.config, case.tensors, num_blocks=96, block_tokens=8, dtype="f32", threads=1)
    # What former sequences leave in a block must never count.
    for block in range(executor.num_blocks):
        view = executor.block_view(block)
        view[:] = b"\xff" * len(view)  # not a number
    return executor


def _tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(211), k=count)  # noqa: S311 - no secret


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    assert (ours - theirs).abs().max().item() < TOLERANCE


def test_whole_prefill(case, executor, sequences, reference_logits):
    tokens = _tokens(150, 1)
    table = sequences(executor)
    _close(table.run(table.next(0, tokens, logits=len(tokens))), reference_logits(case.model, tokens))


@pytest.mark.parametrize("sizes", [(1, 7, 30, 3, 61, 48), (8, 16, 1, 1, 1, 99, 24), (149, 1)])
def test_prefill_in_odd_chunks(case, executor, sequences, reference_logits, sizes):
    tokens = _tokens(150, 2)
    table, parts, start = sequences(executor), [], 0
    for size in sizes:
        parts.append(table.run(table.next(0, tokens[start : start + size], logits=size)))
        start += size
    assert start == len(tokens)
    _close(torch.cat(parts), reference_logits(case.model, tokens))


def test_prefill_without_logits_then_decode(case, executor, sequences, reference_logits):
    tokens = _tokens(90, 3)
    table = sequences(executor)
    assert table.run(table.next(0, tokens[:50], logits=0)).shape == (0, 211)
    rows = [table.run(table.next(0, [token], logits=1)) for token in tokens[50:]]
    _close(torch.cat(rows), reference_logits(case.model, tokens)[50:])


def test_mixed_batch_of_scattered_sequences(case, executor, sequences, reference_logits):
    """Long and short decoding sequences, two prefills and a verification of four tokens, interleaved in one batch."""
    lengths = [130, 2, 17, 64, 9, 40, 33]
    prompts = [_tokens(length, 10 + index) for index, length in enumerate(lengths)]
    table = sequences(executor, seed=5)
    begin = [129, 1, 0, 63, 8, 10, 29]
    table.run(*(table.next(key, prompts[key][: begin[key]], logits=0) for key in range(7) if begin[key]))
    wanted = [1, 1, 17, 1, 1, 5, 4]
    order = [3, 2, 0, 6, 1, 5, 4]
    logits = table.run(*(table.next(key, prompts[key][begin[key] :], logits=wanted[key]) for key in order))
    expected = torch.cat([reference_logits(case.model, prompts[key])[-wanted[key] :] for key in order])
    _close(logits, expected)


def test_greedy_continuation_is_equal(case, executor, sequences):
    prompts = {key: _tokens(length, 20 + key) for key, length in enumerate((5, 31, 24))}
    table = sequences(executor, seed=6)
    logits = table.run(*(table.next(key, prompt, logits=1) for key, prompt in prompts.items()))
    ours: dict[int, list[int]] = {key: [] for key in prompts}
    for _ in range(64):
        chosen = logits.argmax(-1).tolist()
        for key, token in zip(prompts, chosen, strict=True):
            ours[key].append(token)
        logits = table.run(*(table.next(key, [ours[key][-1]], logits=1) for key in prompts))
    for key, prompt in prompts.items():
        assert ours[key] == greedy(case, prompt, 64)
