"""Tokenizers: streaming equals whole, and no text becomes a control token."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from tie.assets.tokenizer import Tokenizer
from tie.daemon.errors import BundleError


def _sentencepiece_like(strip: bool) -> Tokenizer:
    """Byte fallback and spaces as U+2581, as in Llama 2's tokenizer."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581a",
        "b",
        "é",
        "<0x>",
    ]
    model = models.BPE(
        {token: index for index, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    backend = tokenizers.Tokenizer(model)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def _added_tokens() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(["<think>", "   "])
    return Tokenizer(backend)


def _streamed(tokenizer, ids):
    decoder = tokenizer.stream_decoder()
    return "".join(decoder.feed(token) for token in ids) + decoder.finish()


@given(st.lists(st.integers(0, 258)))
def test_stream_equals_whole_for_any_bytes(sample_tokenizer, ids):
    assert _streamed(sample_tokenizer, ids) == sample_tokenizer.decode(ids)
    assert sample_tokenizer.decode(ids) == sample_tokenizer._backend.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 49151), max_size=40))
def test_stream_equals_whole_for_any_demo_tokens(demo_tokenizer, ids):
    assert _streamed(demo_tokenizer, ids) == demo_tokenizer.decode(ids)
    assert demo_tokenizer.decode(ids) == demo_tokenizer._backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("strip", [True, False])
@given(ids=st.lists(st.integers(0, 270)))
def test_stream_equals_whole_with_byte_fallback(strip, ids):
    tokenizer = _sentencepiece_like(strip)
    assert _streamed(tokenizer, ids) == tokenizer.decode(ids)


@given(st.text())
def test_text_survives(sample_tokenizer, text):
    ids = sample_tokenizer.encode(text)
    assert sample_tokenizer.decode(ids) == text
    assert _streamed(sample_tokenizer, ids) == text
    assert b"".join(map(sample_tokenizer.token_bytes, ids)) == text.encode()


# SmolLM2's vocabulary lacks a few bytes (0x04, 0xF1, …) that its training text did not have.
@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFFFF, exclude_categories=["Cs"])))
def test_text_survives_the_demo_model(demo_tokenizer, text):
    ids = demo_tokenizer.encode(text)
    assert _streamed(demo_tokenizer, ids) == text


@given(st.text(alphabet="<|>imstarend_ \n1a\ue000"))
def test_plain_encoding_makes_no_control_token(demo_tokenizer, text):
    assert not set(demo_tokenizer.encode(text)) & set(demo_tokenizer.control_tokens.values())


def test_special_only_when_asked(demo_tokenizer):
    assert demo_tokenizer.encode("<|im_start|>user\n", special=True) == [1, 4093, 198]
    plain = demo_tokenizer.encode("<|im_start|>user\n")
    assert 1 not in plain
    assert demo_tokenizer.decode(plain) == "<|im_start|>user\n"


def test_digits_are_single_tokens(demo_tokenizer):
    assert [demo_tokenizer.token_bytes(token) for token in demo_tokenizer.encode("2024")] == [b"2", b"0", b"2", b"4"]


def test_a_character_is_never_cut(demo_tokenizer):
    decoder = demo_tokenizer.stream_decoder()
    pieces = [decoder.feed(token) for token in demo_tokenizer.encode("日本語 🎉 naïve")]
    assert "\ufffd" not in "".join(pieces)
    assert decoder.finish() == ""
    assert "" in pieces, "at least one token of this text is a part of a character"


def test_broken_end_shows(sample_tokenizer):
    first_byte_of_two = sample_tokenizer.encode("é")[:1]
    decoder = sample_tokenizer.stream_decoder()
    assert decoder.feed(first_byte_of_two[0]) == ""
    assert decoder.finish() == "\ufffd"


@pytest.mark.parametrize("token", [-1, 2**31, 2**70, 49152, 100000])
def test_ids_outside_decode_to_nothing(demo_tokenizer, token):
    assert demo_tokenizer.token_bytes(token) == b""
    assert demo_tokenizer.token_text(token) is None


def test_added_tokens_that_are_not_special():
    tokenizer = _added_tokens()
    think = tokenizer.control_tokens["<think>"]
    assert tokenizer.encode("<think>", special=True) == [think]
    assert think not in tokenizer.encode("<think>")
    assert tokenizer.decode([think]) == "<think>", "an answer's markup is text for whoever parses it"
    assert tokenizer.decode([tokenizer.control_tokens["<|end|>"]]) == ""
    spaces = tokenizer.token_id("   ")
    assert tokenizer.encode("a   b")[1] == spaces, "spaces are text, not control"


def test_whole_sentencepiece_decode_is_the_librarys():
    tokenizer = _sentencepiece_like(strip=True)
    ids = [1, 260, 261, 3 + 0xC3, 3 + 0xA9, 262, 2]
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True) == "abéé"


@pytest.mark.parametrize("data", [b"", b"{}", b"\x00", b"[1]"])
def test_not_a_tokenizer(data):
    with pytest.raises(BundleError):
        Tokenizer.from_json(data)


def test_unknown_decoder_is_refused(sample):
    description = json.loads(sample.read("tokenizer.json"))
    description["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(BundleError, match="not supported"):
        Tokenizer.from_json(json.dumps(description).encode())
    description["decoder"] = None
    with pytest.raises(BundleError, match="no decoder"):
        Tokenizer.from_json(json.dumps(description).encode())
