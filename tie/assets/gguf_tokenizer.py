"""A tokenizer.json from the tokenizer metadata of a GGUF file (byte-level BPE ones)."""

from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tie.assets.manifest import TokenizerInfo
from tie.daemon.errors import BundleError

_CONTROL: Final = 3  # token types of the GGUF specification
_USER_DEFINED: Final = 4
# Tokens that end a turn or a document in the families supported here, whatever the metadata names as "the" EOS.
_ENDS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

# How GPT-4's descendants cut text before merging: contractions; words; digits in runs of up to N; punctuation; spaces.
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT: Final = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_SPLIT: Final = rf"{_WORDS}|\p{{N}}|{_REST}"


def build_tokenizer(metadata: Mapping[str, Any]) -> bytes:
    """Content of an equivalent tokenizer.json.

    Args:
        metadata: the file's key-value pairs, arrays as lists.

    Raises:
        BundleError: the kind of tokenizer or its way to cut text is not supported, or a key is missing.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise BundleError(
            f"GGUF tokenizer {str(kind)[:40]!r} is not supported: only byte-level BPE",
            hint="make the bundle from the model's Hugging Face directory instead",
        )
    tokens: list[str] = array(metadata, "tokenizer.ggml.tokens", str)
    types: list[int] = array(metadata, "tokenizer.ggml.token_type", int)
    # Writers leave empty arrays out.
    merges: list[str] = array(metadata, "tokenizer.ggml.merges", str) if "tokenizer.ggml.merges" in metadata else []
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise BundleError("the GGUF file's vocabulary is inconsistent")
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises nothing more precise
        raise BundleError("the GGUF file's merges do not fit its vocabulary") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    for token, type_ in zip(tokens, types, strict=True):
        if type_ == _CONTROL:
            backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
        elif type_ == _USER_DEFINED:
            backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False)])
    return backend.to_str(pretty=False).encode()


def tokenizer_info(metadata: Mapping[str, Any]) -> TokenizerInfo:
    """What tokenizer.json does not say.

    Raises:
        BundleError: no token ends an answer.
    """
    tokens: list[str] = array(metadata, "tokenizer.ggml.tokens", str)
    types: list[int] = array(metadata, "tokenizer.ggml.token_type", int)

    def named(key: str) -> int | None:
        found = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return found if isinstance(found, int) and 0 <= found < len(tokens) else None

    ends = [named("eos"), named("eot")]
    ends += [index for index, token in enumerate(tokens) if types[index] == _CONTROL and token in _ENDS]
    end_ids = tuple(dict.fromkeys(index for index in ends if index is not None))
    if not end_ids:
        raise BundleError("the GGUF file names no end-of-sequence token")
    bos = named("bos")
    special = {
        "bos_token": bos,
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
    }
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.pre") == "llama-bpe")
    return TokenizerInfo(
        bos_id=bos,
        add_bos=bool(add_bos) and bos is not None,
        end_of_turn_ids=end_ids,
        special_tokens={key: tokens[index] for key, index in special.items() if index is not None},
    )


def array(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """An array of the metadata whose items are of type `kind`.

    Raises:
        BundleError: absent, or something else.
    """
    found = metadata.get(key)
    if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
        raise BundleError(f"the GGUF file has no proper {key}")
    return found


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    match pre:
        case "smollm":
            # Each digit by itself, then GPT-2's expression.
            return pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        case "gpt-2" | "gpt2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "llama-bpe" | "qwen2":
            expression = tokenizers.Regex(_LLAMA3_SPLIT if pre == "llama-bpe" else _QWEN2_SPLIT)
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(expression, behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        case _:
            raise BundleError(
                f"GGUF pre-tokenizer {pre[:40]!r} is not supported",
                hint="make the bundle from the model's Hugging Face directory instead",
            )
