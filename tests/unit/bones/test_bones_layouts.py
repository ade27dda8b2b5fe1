"""Which executor a configuration gets on which machine."""

import pytest

from tie.bones import layouts
from tie.bones.native import library


@pytest.mark.parametrize(
    ("asked", "built", "expected"),
    [
        (("auto", "cpu", "bf16"), ("avx2", "portable"), "native-q4"),
        (("auto", "cpu", "f32"), ("avx2", "portable"), "torch-cpu-f32"),
        (("auto", "cpu", "bf16", 8), ("avx2", "portable"), "torch-cpu-bf16"),
        (("auto", "cpu", "bf16"), ("portable",), "torch-cpu-bf16"),
        (("auto", "cpu", "bf16"), (), "torch-cpu-bf16"),
        (("auto", "cuda", "bf16"), ("avx2",), "torch-cuda-bf16"),
        (("native", "cpu", "f32"), ("portable",), "native-q4"),
        (("native", "cpu", "bf16"), (), "torch-cpu-bf16"),
        (("native", "cuda", "bf16"), ("avx2",), "torch-cuda-bf16"),
        (("torch", "cpu", "bf16"), ("avx2",), "torch-cpu-bf16"),
    ],
)
def test_the_layout_names_what_computes(monkeypatch, asked, built, expected):
    kind, device, dtype, *blocks = asked
    monkeypatch.delenv(library.LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(library, "levels", lambda: built)
    (block_tokens,) = blocks or (16,)
    found = layouts.layout_id(kind, device=device, dtype=dtype, weights="q4", block_tokens=block_tokens)
    assert found == expected


def test_a_level_that_the_environment_names_is_taken_for_fast(monkeypatch):
    monkeypatch.setattr(library, "levels", lambda: ("portable",))
    monkeypatch.setenv(library.LEVEL_VARIABLE, "portable")
    assert layouts.layout_id("auto", device="cpu", dtype="bf16", weights="auto", block_tokens=16) == "native-auto"
