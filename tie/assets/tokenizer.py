"""Text to token ids and back, and a streaming decoder that agrees with the whole decode byte for byte.

Encoding is the `tokenizers` library's. Decoding goes over bytes: each token stands for a fixed byte string, an answer
is their concatenation read as UTF-8 with U+FFFD for every maximal broken part (Unicode 15, section 3.9). So a streamed
answer and a whole one cannot differ, whatever ids a model samples.
"""

import codecs
import json
import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import tokenizers

from tie.assets.bundle import Bundle
from tie.assets.manifest import TOKENIZER_FILE
from tie.daemon.errors import BundleError

_META_SPACE: Final = "\u2581"  # SentencePiece's mark for a space


class Tokenizer:
    """A bundle's tokenizer.

    Attributes:
        vocab_size: ids are below this. (The model's embedding may have more rows: ids beyond decode to nothing.)
        control_tokens: text → id of every token that structures a conversation: special ones, and added ones with a
            visible character (`<think>`, `<tool_call>`). Never made from a user's text.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._silent = frozenset(id_ for id_, token in added.items() if token.special)
        self._verbatim = {id_: token.content.encode() for id_, token in added.items()}
        self.control_tokens: dict[str, int] = {
            token.content: id_ for id_, token in added.items() if token.special or token.content.strip()
        }
        # The library can leave special tokens in a text unrecognized, but not other added ones: make those special too.
        visible = [token for id_, token in added.items() if not token.special and token.content in self.control_tokens]
        backend.add_special_tokens([_as_special(token) for token in visible])
        self.vocab_size: int = max(backend.get_vocab_size(), max(added, default=-1) + 1)
        self._backend = backend
        self._lock = threading.Lock()  # the library's switch for special tokens is a property of the whole tokenizer
        self._byte_level, self._strip_first_space = _decoder_kind(backend)
        self._bytes: dict[int, bytes] = {}
        self._longest = 0  # bytes of text in one token; 0: not known yet

    @classmethod
    def from_json(cls, data: bytes) -> "Tokenizer":
        """Reads the content of a tokenizer.json.

        Raises:
            BundleError: not a tokenizer, or one whose decoder is neither byte-level BPE nor SentencePiece.
        """
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises nothing more precise
            raise BundleError(f"{TOKENIZER_FILE} is not a tokenizer") from error
        return cls(backend)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`; neither BOS nor EOS is added.

        Args:
            text: what to encode.
            special: recognize control tokens written in the text. Never true for text that a user wrote.
        """
        with self._lock:
            self._backend.encode_special_tokens = not special
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def surely_over(self, text_bytes: int, tokens: int) -> bool:
        """Whether any text of `text_bytes` bytes has more than `tokens` tokens, whatever it says.

        Encoding takes seconds for megabytes; this does not.
        """
        if text_bytes <= tokens:
            return False
        if not self._longest:
            # A token covers no more than its own bytes, or what the normalizer made them of: at most four times as
            # much in any normalization form of Unicode, with room to spare.
            longest = max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))
            self._longest = max(1, longest) * (4 if self._backend.normalizer is not None else 1)
        return text_bytes > tokens * self._longest

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens give nothing, broken UTF-8 gives U+FFFD."""
        data = b"".join(map(self.token_bytes, ids))
        if self._strip_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def stream_decoder(self) -> "StreamDecoder":
        """A decoder for one answer."""
        return StreamDecoder(self, strip_first_space=self._strip_first_space)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text: none for special tokens and for ids outside the vocabulary."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._token_bytes(token_id)
        return cached

    def token_text(self, token_id: int) -> str | None:
        """How the vocabulary spells a token (`<|im_end|>`, `Ġthe`), or None outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return None
        text: str | None = self._backend.id_to_token(token_id)
        return text

    def token_id(self, text: str) -> int | None:
        """The id that the vocabulary gives this spelling, or None."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def starts_with(self, token_id: int) -> bool:
        """Whether the tokenizer's own post-processing begins every text with this token."""
        ids: list[int] = self._backend.encode("a", add_special_tokens=True).ids
        return ids[:1] == [token_id]

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._silent:
            return b""
        if token_id in self._verbatim:
            return self._verbatim[token_id]
        text = self.token_text(token_id)
        if text is None:
            return b""
        if self._byte_level:
            table = _byte_level_table()
            try:
                return bytes([table[character] for character in text])
            except KeyError:
                return text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                return text.encode()
        return text.replace(_META_SPACE, " ").encode()


class StreamDecoder:
    """Decodes one answer token by token; all `feed`s and the `finish` together equal `Tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, strip_first_space: bool) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_first_space

    def feed(self, token_id: int) -> str:
        """The whole characters that are known now that `token_id` has come; may be empty."""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(bundle: Bundle) -> Tokenizer:
    """The bundle's tokenizer.

    Raises:
        BundleError: damaged or not supported.
    """
    return Tokenizer.from_json(bundle.read(TOKENIZER_FILE))


def _as_special(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(byte-level, strips the first space) of the tokenizer's own decoder."""
    if backend.decoder is None:
        raise BundleError(f"{TOKENIZER_FILE} has no decoder")
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if "Metaspace" in kinds:
        return False, kinds["Metaspace"].get("prepend_scheme", "always") != "never"
    if kinds.get("Replace", {}).get("pattern") == {"String": _META_SPACE}:
        strip = kinds.get("Strip", {})
        return False, strip.get("content") == " " and strip.get("start") == 1
    raise BundleError(f"{TOKENIZER_FILE}: decoder {sorted(kinds)} is not supported")


@lru_cache(maxsize=1)
def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 for itself, the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(sorted(set(range(256)) - printable))})
    return table
