"""GGUF's formats of 256 values with scales of scales, against the format as ggml's quantization sources define it."""

import numpy as np
import pytest

from tie.assets.tensors import StoredTensor, read_groups, read_rows, stored_bytes

COLUMNS = 512


def _half(data: bytes) -> float:
    return float(np.frombuffer(data, "<f2")[0])


def _q4_k(block: bytes) -> list[float]:
    """Scale, minimum, 12 bytes of eight 6-bit scales and minima, 128 bytes of two 4-bit codes."""
    scale, least, packed, codes = _half(block[:2]), _half(block[2:4]), block[4:16], block[16:]
    values = []
    for part in range(8):
        if part < 4:
            part_scale, part_least = packed[part] & 63, packed[part + 4] & 63
        else:
            part_scale = packed[part + 4] & 15 | packed[part - 4] >> 6 << 4
            part_least = packed[part + 4] >> 4 | packed[part] >> 6 << 4
        for byte in codes[part // 2 * 32 : part // 2 * 32 + 32]:
            code = byte >> 4 if part % 2 else byte & 15
            values.append(scale * part_scale * code - least * part_least)
    return values


def _q6_k(block: bytes) -> list[float]:
    """128 bytes of low 4 bits, 64 of high 2 bits, 16 signed scales, one scale of them."""
    low, high, scales, scale = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8), _half(block[208:])
    values = []
    for index in range(256):
        half, rest = divmod(index, 128)
        quarter, place = divmod(rest, 32)
        byte = low[half * 64 + quarter % 2 * 32 + place]
        code = (byte >> 4 if quarter > 1 else byte & 15) | (high[half * 32 + place] >> 2 * quarter & 3) << 4
        values.append(scale * int(scales[index // 16]) * (code - 32))
    return values


@pytest.mark.parametrize(("encoding", "halves", "expected"), [("q4_k", (0, 2), _q4_k), ("q6_k", (208,), _q6_k)])
def test_values_are_what_the_format_says(encoding, halves, expected):
    rows, size = 3, stored_bytes(encoding, 1, 256)
    random = np.random.default_rng(4)
    raw = random.integers(0, 256, (rows * COLUMNS // 256, size), np.uint8)
    for place in halves:  # scales of ordinary size
        raw[:, place : place + 2] = random.uniform(0.001, 0.1, (len(raw), 1)).astype(np.float16).view(np.uint8)
    stored = StoredTensor(
        name="x", file="x.gguf", encoding=encoding, shape=(rows, COLUMNS), offset=0, bytes=raw.size, interleaved_heads=0
    )
    found = read_rows(stored, raw.reshape(-1), 0, rows)
    values = [expected(block.tobytes()) for block in raw]
    np.testing.assert_allclose(found, np.array(values, np.float32).reshape(rows, COLUMNS), rtol=1e-5, atol=1e-6)
    assert read_groups(stored, raw.reshape(-1), 0, rows) is None
