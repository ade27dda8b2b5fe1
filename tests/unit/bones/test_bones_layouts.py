"""Which executor a configuration gets on which machine."""

import pytest

from tie.bones import layouts
from tie.bones.native import library


@pytest.mark.parametrize(
    ("asked", "built", "expected"),
    [
        (("auto", "bf16"), ("avx2", "portable"), "native-q4"),
        (("auto", "f32"), ("avx2", "portable"), "torch-cpu-f32"),
        (("auto", "bf16", 8), ("avx2", "portable"), "torch-cpu-bf16"),
        (("auto", "bf16"), ("portable",), "torch-cpu-bf16"),
        (("auto", "bf16"), (), "torch-cpu-bf16"),
        (("native", "f32"), ("portable",), "native-q4"),
        (("native", "bf16"), (), "torch-cpu-bf16"),
        (("torch", "bf16"), ("avx2",), "torch-cpu-bf16"),
        (("cuda", "bf16"), ("avx2",), "cuda-bf16"),
        (("cuda", "bf16", 8), (), "cuda-bf16"),
    ],
)
def test_the_layout_names_what_computes(monkeypatch, asked, built, expected):
    kind, dtype, *blocks = asked
    monkeypatch.delenv(library.LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(library, "levels", lambda: built)
    (block_tokens,) = blocks or (16,)
    found = layouts.layout_id(kind, dtype=dtype, weights="q4", block_tokens=block_tokens)
    assert found == expected


def test_several_ranks_are_pytorch_s(monkeypatch):
    monkeypatch.setattr(library, "levels", lambda: ("avx2",))
    assert layouts.layout_id("auto", dtype="bf16", weights="auto", block_tokens=16, ranks=2) == "torch-cpu-bf16"


def test_a_level_that_the_environment_names_is_taken_for_fast(monkeypatch):
    monkeypatch.setattr(library, "levels", lambda: ("portable",))
    monkeypatch.setenv(library.LEVEL_VARIABLE, "portable")
    assert layouts.layout_id("auto", dtype="bf16", weights="auto", block_tokens=16) == "native-auto"
