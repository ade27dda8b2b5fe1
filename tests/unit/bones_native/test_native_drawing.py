"""Drawing in compiled code, beside the sampler's own arithmetic: the same tokens from the same random numbers."""

import numpy as np
import pytest

from tie.bones import sampler
from tie.bones.native import drawing, library
from tie.bones.sampler import SampleRow, SamplingParams, sample

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")
ASKED = [
    {},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_p": 0.7},
    {"temperature": 0.01, "top_p": 0.5},
    {"temperature": 50.0, "top_p": 0.3},
    {"top_p": 0.9, "logit_bias": {3: -1000.0}, "bad_ids": frozenset({0, 5})},
    {"top_k": 40, "top_p": 0.9},
]


@pytest.mark.parametrize("level", library.levels())
@pytest.mark.parametrize("vocab_size", [1, 5, 255, 256, 257, 1000, 5003])
@pytest.mark.parametrize("asked", ASKED)
def test_the_same_tokens_as_without_it(monkeypatch, level, vocab_size, asked):
    if vocab_size < 6 and ("bad_ids" in asked):
        pytest.skip("such tokens are not there")
    logits = (np.random.default_rng(vocab_size).standard_normal((40, vocab_size)) * 4 + 100).astype(np.float32)
    params = [SamplingParams(**{"temperature": 0.8, "seed": seed, **asked}) for seed in range(len(logits))]
    rows = [SampleRow(each, position) for position, each in enumerate(params)]
    compiled = library.load(level)
    monkeypatch.setattr(drawing, "loaded", lambda: compiled)
    ours = [one.token_id for one in sample(logits, rows)]
    monkeypatch.setattr(drawing, "loaded", lambda: None)
    assert [one.token_id for one in sample(logits, rows)] == ours


def test_it_is_what_draws(monkeypatch):
    def refused(*_args):
        raise AssertionError("drawn by NumPy")

    monkeypatch.setattr(sampler, "_race", refused)
    assert sample(np.zeros((1, 9), np.float32), [SampleRow(SamplingParams(temperature=1.0), 0)])[0].token_id < 9


def test_what_is_impossible_is_refused():
    compiled = drawing.loaded()
    drawer = drawing.Drawer(compiled, np.empty(0, np.float32))
    with pytest.raises(RuntimeError, match="vocabulary"):
        drawer.draw(np.empty(0, np.float32), 0.0, np.random.default_rng(0), SamplingParams(temperature=1.0))
