"""Grammars: masks, ends, refusals; hostile ones cost only themselves."""

import numpy as np
import pytest

from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.sample import make_sample_bundle
from tie.runtime.grammar import GrammarError
from tie.runtime.grammar_compiler import MAX_GRAMMAR_BYTES, GrammarCompiler

VOCABULARY = 300  # wider than the tokenizer's 259, as models' often are


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_sample_bundle(tmp_path_factory.mktemp("grammar") / "bundle")


@pytest.fixture(scope="module")
def compiler(bundle):
    compiler = GrammarCompiler(
        bundle.read(TOKENIZER_FILE).decode(), VOCABULARY, bundle.manifest.tokenizer.end_of_turn_ids
    )
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def token_of(bundle):
    from tie.assets.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(bundle)
    return lambda character: tokenizer.encode(character)[0]


def compiled(compiler, text):
    return compiler.compile(text).result(timeout=10)


def allowed(mask):
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_mask_allows_what_the_grammar_does_and_nothing_beyond_the_vocabulary(compiler, token_of):
    grammar = compiled(compiler, "start: /[0-9]{2}/")
    assert allowed(grammar.mask()) == {token_of(digit) for digit in "0123456789"}
    grammar.accept(token_of("4"))
    assert not grammar.complete
    grammar.accept(token_of("2"))
    assert grammar.complete


def test_the_canarys_empty_grammar_allows_any_text(compiler, bundle):
    mask = allowed(compiled(compiler, "").mask())
    assert len(mask) > 128  # every byte that text can begin with
    assert set(bundle.manifest.tokenizer.end_of_turn_ids) <= mask
    assert max(mask) < 259


def test_a_token_that_the_grammar_forbids_is_an_error(compiler, token_of):
    with pytest.raises(GrammarError):
        compiled(compiler, "start: /[0-9]/").accept(token_of("x"))


def test_a_fork_walks_its_own_way(compiler, token_of):
    first = compiled(compiler, "start: /ab|cd/")
    second = first.fork()
    first.accept(token_of("a"))
    second.accept(token_of("c"))
    assert allowed(first.mask()) == {token_of("b")}
    assert allowed(second.mask()) == {token_of("d")}


@pytest.mark.parametrize("rule", ["a", "A"], ids=["rules", "terminals"])
def test_a_long_chain_of_references_does_not_overflow_a_stack(compiler, token_of, rule):
    chain = "".join(f"{rule}{index}: {rule}{index + 1}\n" for index in range(9000))
    grammar = compiled(compiler, f'start: {rule}0\n{chain}{rule}9000: "x"\n')
    assert allowed(grammar.mask()) == {token_of("x")}
    grammar.accept(token_of("x"))
    assert grammar.complete


def test_the_canarys_grammar_is_ready_even_when_the_compiler_is_not(compiler):
    assert compiler.compile("").done()


@pytest.mark.parametrize(
    "text",
    ["start: (((", "nonsense", '{"grammars": 7}', "start: other", "x" * (MAX_GRAMMAR_BYTES + 1)],
    ids=["unbalanced", "nonsense", "wrong-json", "undefined", "too-large"],
)
def test_what_does_not_compile_is_refused_without_quoting_it(compiler, text):
    with pytest.raises(GrammarError) as caught:
        compiled(compiler, text)
    assert text not in str(caught.value)
