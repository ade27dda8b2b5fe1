"""A bundle of random weights in the shape of Qwen2.5-0.5B, as a GGUF file of 4-bit groups: for speed, not for sense."""

import tempfile
from pathlib import Path

import gguf
import numpy as np

from tie.assets.build import create_bundle, read_source
from tie.assets.bundle import Bundle, open_bundle

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 896, 4864, 24, 14, 2, 64, 151936
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def qwen_shaped_bundle(directory: Path) -> Bundle:
    """The bundle in `directory`, made when it is not there."""
    if not directory.exists():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "random.gguf"
            _write(file)
            create_bundle(read_source(file), directory)
    return open_bundle(directory.absolute())


def _write(file: Path) -> None:
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_name("Random 0.5B")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    tokens = [*_byte_tokens(), "ab", *(f"<|{number}|>" for number in range(257, VOCAB))]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL if len(token) < 3 else gguf.TokenType.CONTROL for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(VOCAB - 2)
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_chat_template(CHAT)
    source = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", _q8_0(source, VOCAB, HIDDEN), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HEADS * DIM, HIDDEN),
            "attn_k": (KV_HEADS * DIM, HIDDEN),
            "attn_v": (KV_HEADS * DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * DIM),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        for name, (rows, columns) in shapes.items():
            data = _q4_1(source, rows, columns)
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            if name in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"blk.{layer}.{name}.bias", np.zeros(rows, np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _byte_tokens() -> list[str]:
    """GPT-2's characters for the 256 bytes (Radford et al. 2019): printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


def _q4_1(source: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Random blocks: scale, minimum, 16 bytes of two codes; of the size that keeps activations about as they are."""
    scale = 1 / (4.6 * columns**0.5)
    head = np.array([scale, -7.5 * scale], np.float16).view(np.uint8)
    blocks = source.integers(0, 256, (rows, columns // 32, 20), np.uint8)
    blocks[..., :4] = head
    return blocks.reshape(rows, -1)


def _q8_0(source: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    blocks = source.integers(0, 256, (rows, columns // 32, 34), np.uint8)
    blocks[..., :2] = np.array([1 / 74], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)
