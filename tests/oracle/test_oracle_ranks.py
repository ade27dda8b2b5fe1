"""A model on several ranks, real processes over gloo, against transformers and against one rank, in float32."""

import random

import pytest
import torch

from oracle_models import CASES, Case, greedy
from rank_processes import Ranks
from tie.bones.executor import Executor

pytestmark = pytest.mark.oracle

TOLERANCE = 3e-4  # as of one rank; what is promised is 1e-3
OPTIONS = {"num_blocks": 64, "block_tokens": 8, "dtype": "f32", "threads": 1}
KINDS = {
    (2, 1): ("llama", "qwen2", "qwen3", "llama-tied-biased", "mistral"),
    (1, 2): ("llama", "qwen2", "qwen3"),
    (2, 2): ("llama-tied-biased",),
}


@pytest.fixture(scope="module")
def ranks(request):
    found = Ranks(*request.param)
    yield found
    found.close()


@pytest.fixture(scope="module")
def case(request) -> Case:
    return CASES[request.param]()


@pytest.fixture(scope="module")
def executor(case, ranks):
    return ranks.open(case.config, case.tensors, **OPTIONS)


def _tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(211), k=count)  # noqa: S311 - no secret


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(split, kind, id=f"tp{split[0]}-pp{split[1]}-{kind}")
        for split, kinds in KINDS.items()
        for kind in kinds
    ],
    indirect=True,
    scope="module",
)
def test_ranks_give_the_reference_s_logits_and_answers(case, executor, sequences, reference_logits):
    """Chunks, a mixed batch, rows that nobody wants, and an answer of 32 tokens on top of it."""
    prompts = {0: _tokens(61, 1), 1: _tokens(9, 2), 2: _tokens(17, 3)}
    table, alone = sequences(executor), sequences(Executor(case.config, case.tensors, **OPTIONS))
    for each in (table, alone):
        first = each.run(each.next(0, prompts[0][:30], logits=0), each.next(1, prompts[1][:8], logits=0))
        assert first.shape == (0, 211)
    wanted = [(1, prompts[1][8:], 1), (2, prompts[2], 17), (0, prompts[0][30:], 31)]
    logits, one = (
        each.run(*(each.next(key, tokens, logits=count) for key, tokens, count in wanted)) for each in (table, alone)
    )
    expected = torch.cat([reference_logits(case.model, prompts[key])[-count:] for key, _, count in wanted])
    assert (logits - expected).abs().max().item() < TOLERANCE
    assert (logits - one).abs().max().item() < TOLERANCE
    ours = {key: [int(logits[row].argmax())] for key, row in ((1, 0), (2, 17), (0, 48))}
    for _ in range(31):
        logits = table.run(*(table.next(key, [ours[key][-1]], logits=1) for key in ours))
        for key, token in zip(ours, logits.argmax(-1).tolist(), strict=True):
            ours[key].append(token)
    assert ours == {key: greedy(case, prompt, 32) for key, prompt in prompts.items()}
