"""One request, served in every way (alone, batched, preempted, guessed ahead, from the prefix pool): the same tokens.

On two small random models, in float32 on the real executor. Sums in another order round otherwise, so where the first
difference is between two tokens that the model hardly tells apart, that is a tie and no fault.
"""

import numpy as np
import pytest
import torch

from collecting import Collect
from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.sample import make_sample_bundle
from tie.assets.tokenizer import load_tokenizer
from tie.bones.config import ModelConfig
from tie.bones.cuda.executor import CudaExecutor
from tie.bones.executor import Batch, Executor, SequenceSlice
from tie.bones.llama import tensor_shapes
from tie.bones.sampler import SampleRow, sample
from tie.proto import runtime_pb2 as pb
from tie.runtime import speculation
from tie.runtime.blocks import BlockPool
from tie.runtime.engine import Engine
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.prefix_cache import PrefixCache
from tie.runtime.prefix_trie import PrefixTrie
from tie.runtime.request import Bounds, check
from tie.runtime.scheduler import Limits

VOCABULARY = 259
BLOCK_TOKENS = 8
MAX_LENGTH = 200
WAIT_S = 60
TIE = 1e-4

COMMON = {"vocab_size": VOCABULARY, "context_tokens": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
MODELS = {
    "llama": {"kind": "llama", "hidden_size": 48, "intermediate_size": 96, "num_layers": 3, "num_heads": 6}
    | {"num_kv_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "qwen3": {"kind": "qwen3", "hidden_size": 32, "intermediate_size": 80, "num_layers": 2, "num_heads": 4}
    | {"num_kv_heads": 4, "head_dim": 16, "tie_word_embeddings": False, "qk_norm": True},
}
# Some repeat themselves, so that there is something to guess; lengths around the borders of blocks and chunks.
PROMPTS = [
    list(b"once upon a time, once upon a time, once upon a"),
    list(b"x"),
    list(b"The quick brown fox jumps over the lazy dog. The quick brown fox"),
    list(b"12345678"),
    list(b"abcabcabcabcabcabcabcabcabcabcabcab"),
    list(range(1, 100)),
]
# Registered prompts: two share a block, one is longer than what is asked, one ends inside a block.
REGISTERED = [PROMPTS[0], PROMPTS[2][:20], [*PROMPTS[2][:8], *b"another end"], [*PROMPTS[3], 1], [*range(1, 120)]]


class Sealed:
    """The blocks of registered prompts, as a pool has them."""

    def __init__(self, trie, executor):
        self.blocks = {}
        for prompt in REGISTERED:
            executor.forward(Batch((SequenceSlice(prompt, 0, range(executor.num_blocks), 1),)))
            for index, node in enumerate(trie.path(prompt)):
                self.blocks[node] = memoryview(bytearray(executor.block_bytes))
                executor.read_block(index, self.blocks[node])

    def block(self, number):
        return self.blocks[number][:]


class Answer(Collect):
    """A request's sink, and what its client sees."""

    def answer(self, index=0):
        """What a client sees of one choice: ids, logprobs, how it ended."""
        tokens = [event.tokens for event in self.seen if event.HasField("tokens") and event.tokens.index == index]
        ends = [event.finished for event in self.seen if event.HasField("finished") and event.finished.index == index]
        ids = [token for part in tokens for token in part.token_ids]
        logprobs = [entry.logprob for part in tokens for entry in part.logprobs]
        return ids, logprobs, (ends[0].reason, ends[0].drop_bytes, ends[0].completion_tokens)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_sample_bundle(tmp_path_factory.mktemp("same") / "bundle")


@pytest.fixture(scope="module")
def compiler(bundle):
    compiler = GrammarCompiler(bundle.read(TOKENIZER_FILE).decode(), VOCABULARY, (258,))
    yield compiler
    compiler.close()


class Served:
    """A model, and ways to serve requests on it."""

    def __init__(self, name, bundle, compiler):
        self.config = ModelConfig(**COMMON, **MODELS[name])
        dice = torch.Generator().manual_seed(len(name))
        shapes = tensor_shapes(self.config)
        # Of a size that gives logits of an ordinary spread.
        self.tensors = {
            key: torch.randn(shape, generator=dice) * (shape[-1] ** -0.5 * 2 if len(shape) > 1 else 1)
            for key, shape in shapes.items()
        }
        self.bundle, self.compiler = bundle, compiler
        self.answers = {}

    def executor(self, blocks):
        return Executor(self.config, self.tensors, num_blocks=blocks, block_tokens=BLOCK_TOKENS, dtype="f32", threads=1)

    def serve(self, requests, *, blocks=200, step_tokens=256, max_running=16, guesses=False, prefix=False):
        """All at once; the sinks, and the engine's metrics."""
        executor, cache = self.executor(blocks), PrefixCache(BlockPool(blocks, BLOCK_TOKENS))
        if prefix:
            trie = PrefixTrie(REGISTERED, BLOCK_TOKENS)
            cache.open(trie, Sealed(trie, self.executor(20)), executor)
        engine = Engine(
            executor,
            cache.pool,
            Limits(step_tokens=step_tokens, max_running=max_running, max_waiting=100),
            Bounds(VOCABULARY, MAX_LENGTH),
            tokenizer=load_tokenizer(self.bundle),
            end_ids=frozenset({258}),
            grammars=self.compiler,
            speculation=guesses,
            prefix=cache,
            on_failure=lambda: None,
        )
        sinks = [Answer(WAIT_S) for _ in requests]
        for request, sink in zip(requests, sinks, strict=True):
            engine.submit(check(request, engine.bounds), sink)
        engine.start()
        for sink in sinks:
            assert sink.end.HasField("finished"), sink.end
        assert engine.stop(WAIT_S)
        ledger = engine.pool.statistics()
        assert (ledger.used, ledger.handed_out) == (0, ledger.returned)
        return sinks, engine.metrics.text()

    def alone(self, requests):
        for request in requests:
            key = request.SerializeToString(deterministic=True)
            if key not in self.answers:
                self.answers[key] = self.serve([request])[0][0].answer()
        return [self.answers[request.SerializeToString(deterministic=True)] for request in requests]

    def assert_same(self, request, expected, got, index=0):
        if got == expected:
            return
        step = next((step for step, (a, b) in enumerate(zip(expected[0], got[0], strict=False)) if a != b), None)
        assert step is not None, "one answer is longer"
        tokens = [*request.token_ids, *expected[0][:step]]
        executor = self.executor(-(-len(tokens) // BLOCK_TOKENS))
        logits = executor.forward(Batch((SequenceSlice(tokens, 0, range(executor.num_blocks), 1),)))
        row = SampleRow(
            check(request, Bounds(VOCABULARY, MAX_LENGTH)).params[index],
            position=step,
            prompt_ids=request.token_ids,
            output_ids=expected[0][:step],
        )
        # A tie is where the faintest noise makes the choice: the margin of rounding, a ten thousandth of a logit.
        dice = torch.Generator().manual_seed(0)
        logits = torch.as_tensor(logits)
        noisy = (logits + TIE * torch.randn(logits.shape, generator=dice) for _ in range(200))
        chosen = {sample(candidate, [row])[0].token_id for candidate in noisy}
        assert {expected[0][step], got[0][step]} <= chosen, f"another token at {step}"


@pytest.fixture(scope="module", params=MODELS)
def served(request, bundle, compiler):
    threads = torch.get_num_threads()
    yield Served(request.param, bundle, compiler)
    torch.set_num_threads(threads)


@pytest.fixture
def eager(monkeypatch):
    """Guesses are made wherever there is something to guess, whatever they cost."""
    monkeypatch.setattr(
        speculation, "best_lengths", lambda rates, _cost: ([speculation.LONGEST if rate else 0 for rate in rates], 2.0)
    )


def requests(**fields):
    fields = {"max_tokens": 60, "ignore_eos": True} | fields
    return [pb.GenerateRequest(token_ids=prompt, **fields) for prompt in PROMPTS]


def seeded(**fields):
    sampling = pb.Sampling(temperature=0.7, top_k=40, top_p=0.95, seed=77)
    return requests(sampling=sampling, **fields)


def counted(metrics, name):
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(f"tie_runtime_{name}"))


WAYS = {
    "batched": {},
    "in chunks": {"step_tokens": 17},
    "preempted": {"blocks": 26},
    "preempted in chunks, two at a time": {"blocks": 26, "step_tokens": 7, "max_running": 2},
    "guessed": {"guesses": True},
    "guessed, preempted and in chunks": {"guesses": True, "blocks": 26, "step_tokens": 17},
    "with the prefix pool": {"prefix": True},
    "with the prefix pool, preempted and in chunks": {"prefix": True, "blocks": 26, "step_tokens": 17},
    "with the prefix pool, guessed": {"prefix": True, "guesses": True},
}


@pytest.mark.parametrize("asked", [requests, seeded])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_tokens(served, eager, way, asked):
    wanted = asked()
    expected = served.alone(wanted)
    sinks, metrics = served.serve(wanted, **WAYS[way])
    for request, answer, sink in zip(wanted, expected, sinks, strict=True):
        served.assert_same(request, answer, sink.answer())
    assert bool(counted(metrics, "preemptions_total")) == ("preempted" in way)
    guesses = [counted(metrics, f'draft_tokens_total{{outcome="{outcome}"}}') for outcome in ("accepted", "rejected")]
    assert any(guesses) == ("guessed" in way)
    assert all(guesses) or asked is seeded or "guessed" not in way
    assert bool(counted(metrics, "prefix_hits_total")) == ("prefix" in way)


@pytest.mark.parametrize("way", ["batched", "preempted in chunks, two at a time", "with the prefix pool, guessed"])
def test_on_the_executor_for_a_gpu_the_tokens_are_the_same(served, eager, monkeypatch, way):
    """Here on the CPU: padded steps, logits that the next step overwrites, blocks that are copied in and out."""
    wanted = [*requests(), *seeded(), *requests(grammar="start: /(ab|cd|[0-9])+/")]
    expected = served.alone(wanted)
    shape = {"block_tokens": BLOCK_TOKENS, "dtype": "f32", "device": "cpu", "kernel": "reference", "most_decoding": 12}
    monkeypatch.setattr(
        served, "executor", lambda blocks: CudaExecutor(served.config, served.tensors, num_blocks=blocks, **shape)
    )
    sinks, _ = served.serve(wanted, **({"max_running": 18} | WAYS[way]))
    for request, answer, sink in zip(wanted, expected, sinks, strict=True):
        served.assert_same(request, answer, sink.answer())


def test_only_what_follows_the_registered_prompt_is_computed(served):
    own = list(b" and a question of one's own")
    wanted = pb.GenerateRequest(token_ids=[*REGISTERED[4], *own], max_tokens=5, ignore_eos=True)
    plain, before = served.serve([wanted])
    sinks, after = served.serve([wanted, wanted], prefix=True, max_running=1)
    whole = len(REGISTERED[4]) // BLOCK_TOKENS * BLOCK_TOKENS
    assert counted(before, "computed_tokens_total") == len(wanted.token_ids) + 4
    assert counted(after, "computed_tokens_total") == 2 * (len(wanted.token_ids) - whole + 4)
    assert counted(after, "prefix_tokens_total") == 2 * whole
    assert counted(after, 'prefix_block_moves_total{way="loaded"}') == whole // BLOCK_TOKENS
    for sink in sinks:
        served.assert_same(wanted, plain[0].answer(), sink.answer())
        assert sink.seen[-1].finished.cached_tokens == whole
    assert plain[0].seen[-1].finished.cached_tokens == 0


def test_what_users_wrote_is_never_shared(served):
    """Twice the same long prompt of a user, after a registered one and without: each computes all of it."""
    own = list(b"somebody's secret, which fills several blocks, twice")
    for start in ([], REGISTERED[4]):
        wanted = pb.GenerateRequest(token_ids=[*start, *own], max_tokens=3, ignore_eos=True)
        whole = len(start) // BLOCK_TOKENS * BLOCK_TOKENS
        for max_running in (1, 2):  # one after the other, and side by side
            sinks, metrics = served.serve([wanted, wanted], prefix=True, max_running=max_running)
            assert counted(metrics, "computed_tokens_total") == 2 * (len(wanted.token_ids) - whole + 2)
            assert [sink.seen[-1].finished.cached_tokens for sink in sinks] == [whole] * 2


@pytest.mark.parametrize("way", [{}, {"blocks": 40}, {"guesses": True}, {"prefix": True}])
def test_choices_are_what_requests_of_their_seeds_are(served, eager, way):
    """Greedy: all alike. Sampled: each what its own seed gives alone; the first what the request is with n = 1."""
    for wanted in (requests(n=4)[:3], seeded(n=4)[:3]):
        sinks, metrics = served.serve(wanted, **way)
        for request, sink in zip(wanted, sinks, strict=True):
            for index, params in enumerate(check(request, Bounds(VOCABULARY, MAX_LENGTH)).params):
                single = pb.GenerateRequest()
                single.CopyFrom(request)
                single.n = 1
                single.sampling.seed = params.seed
                served.assert_same(single, served.alone([single])[0], sink.answer(index))
        assert bool(counted(metrics, "preemptions_total")) == ("blocks" in way)


EXTRAS = {
    "penalties": {"sampling": pb.Sampling(repetition_penalty=1.02, presence_penalty=0.05, frequency_penalty=0.02)},
    "logprobs": {"logprobs": 3},
    "min_tokens": {"min_tokens": 30, "ignore_eos": False, "stop_token_ids": list(range(0, 259, 3))},
    "stop": {"stop": ["e", "ab", "12"]},
    "stop ids": {"stop_token_ids": list(range(0, 259, 17))},
    "grammar": {"grammar": 'start: ("abc" | "hello there " | /[x-z]/)+'},
    "sampled grammar": {"grammar": "start: /(ab|cd|[0-9])+/", "sampling": pb.Sampling(temperature=1, seed=5)},
    "logit bias": {"sampling": pb.Sampling(logit_bias={97: 3.0, 98: 3.0}, bad_token_ids=[99])},
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_guessing_changes_nothing_of_what_a_request_asks_for(served, eager, extra):
    wanted = requests(**EXTRAS[extra])
    expected, _ = served.serve(wanted)
    sinks, metrics = served.serve(wanted, guesses=True)
    for request, one, other in zip(wanted, expected, sinks, strict=True):
        plain, guessed = one.answer(), other.answer()
        served.assert_same(request, (plain[0], [], plain[2]), (guessed[0], [], guessed[2]))
        assert guessed[1] == pytest.approx(plain[1], abs=1e-3)
    assert counted(metrics, 'draft_tokens_total{outcome="rejected"}')


@pytest.mark.parametrize("guesses", [False, True])
def test_four_times_too_much_load_completes_without_losing_a_block(served, eager, guesses):
    """`serve` looks at the ledger: everything that was handed out has come back."""
    sampling = [pb.Sampling(temperature=0.7, seed=seed) for seed in range(3)]
    wanted = [*requests(n=2), *(one for how in sampling for one in requests(sampling=how))]
    longest = max(len(request.token_ids) + request.max_tokens for request in wanted)
    demand = sum((len(request.token_ids) + request.max_tokens) * max(1, request.n) for request in wanted)
    blocks = demand // (4 * BLOCK_TOKENS)
    assert longest <= blocks * BLOCK_TOKENS
    sinks, metrics = served.serve(wanted, blocks=blocks, max_running=len(wanted) + 6, guesses=guesses)
    assert counted(metrics, "preemptions_total")
    for request, answer, sink in zip(wanted, served.alone(wanted), sinks, strict=True):
        served.assert_same(request, answer, sink.answer())


LETTERS = list(b"abcd")
ANSWERS = 384  # of each kind, 8 tokens long


def histogram(served, first_seed, *, temperature=1.0, guesses=False):
    """How often each letter came at each place of an answer, over a fixed set of seeds; and the metrics."""
    counts, told = np.zeros((8, len(LETTERS))), ""
    for begin in range(first_seed, first_seed + ANSWERS, 96):
        wanted = [
            pb.GenerateRequest(
                token_ids=list(b"abacadbcbdcdaabbccddab"),
                max_tokens=8,
                ignore_eos=True,
                sampling=pb.Sampling(temperature=temperature, seed=seed, allowed_token_ids=LETTERS),
            )
            for seed in range(begin, begin + 96)
        ]
        sinks, metrics = served.serve(wanted, guesses=guesses)
        told += metrics
        for sink in sinks:
            for place, token in enumerate(sink.answer()[0]):
                counts[place, LETTERS.index(token)] += 1
    assert counts.sum() == 8 * ANSWERS
    return counts, told


def chi_square(one, other):
    """The two-sample statistic, less its mean, in standard deviations; places with few answers count as one."""
    statistic, freedom = 0.0, 0
    for place, difference in zip(one + other, one - other, strict=True):
        rare = place < 10
        both, apart = np.append(place[~rare], place[rare].sum()), np.append(difference[~rare], difference[rare].sum())
        kept = both > 0
        statistic += (apart[kept] ** 2 / both[kept]).sum()
        freedom += kept.sum() - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


def test_guessed_answers_have_the_distribution_of_plain_ones(served, eager):
    """Other seeds than the plain ones: the same tokens for the same seed would hide a bias that both have."""
    plain, _ = histogram(served, 0)
    guessed, metrics = histogram(served, 10_000, guesses=True)
    for outcome in ("accepted", "rejected"):
        assert counted(metrics, f'draft_tokens_total{{outcome="{outcome}"}}') > ANSWERS / 4
    assert chi_square(plain, guessed) < 4
    warmer, _ = histogram(served, 20_000, temperature=1.5)
    assert chi_square(plain, warmer) > 6, "the test would not notice"
