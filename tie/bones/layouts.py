"""Which executor a node runs, and how it wants the weights packed: the model owner and the runtime must agree."""

from typing import Final, Literal

from tie.bones.native import library

Kind = Literal["auto", "torch", "native", "cuda"]

NATIVE_PREFIX: Final = "native-"
CUDA_PREFIX: Final = "cuda-"


def layout_id(kind: Kind, *, dtype: str, weights: str, block_tokens: int, ranks: int = 1) -> str:
    """How the node's configuration wants the weights: `native-<weights>`, `torch-cpu-<dtype>` or `cuda-<dtype>`.

    "auto" is the native executor where it is fast, unless float32, another size of blocks or several ranks are asked
    for, which are PyTorch's alone. Where the native one cannot run, for the package was built without a compiler,
    PyTorch takes its place: the layout says so, and with it the node's status. "cuda" is a GPU or an error; whether
    there is one is the runtime's to see, for the model owner has none.
    """
    if kind == "cuda":
        return CUDA_PREFIX + dtype
    fits = dtype != "f32" and block_tokens == library.BLOCK_TOKENS
    wanted = library.available() if kind == "native" else kind == "auto" and fits and ranks == 1 and library.fast()
    return NATIVE_PREFIX + weights if wanted else f"torch-cpu-{dtype}"
