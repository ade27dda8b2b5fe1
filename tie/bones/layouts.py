"""Which executor a node runs, and how it wants the weights packed: the model owner and the runtime must agree."""

from typing import Final, Literal

from tie.bones.native import library

Kind = Literal["auto", "torch", "native"]

NATIVE_PREFIX: Final = "native-"


def layout_id(kind: Kind, *, device: str, dtype: str, weights: str, block_tokens: int) -> str:
    """The layout that the node's configuration asks for: `native-<weights>` or `torch-<device>-<dtype>`.

    "auto" is the native executor where it is fast, unless float32 or another size of blocks is asked for, which are
    PyTorch's alone. Where the native one cannot run (the package was built without a compiler, or the node computes on
    a GPU), PyTorch takes its place: the layout says so, and with it the node's status.
    """
    fits = dtype != "f32" and block_tokens == library.BLOCK_TOKENS
    wanted = library.available() if kind == "native" else kind == "auto" and fits and library.fast()
    if wanted and device == "cpu":
        return NATIVE_PREFIX + weights
    return f"torch-{device}-{dtype}"
