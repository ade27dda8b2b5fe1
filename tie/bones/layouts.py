"""Which executor a node runs, and how it wants the weights packed: the model owner and the runtime must agree."""

from typing import Final, Literal

from tie.bones.native import library

Kind = Literal["torch", "native"]

NATIVE_PREFIX: Final = "native-"


def layout_id(kind: Kind, *, device: str, dtype: str, weights: str) -> str:
    """The layout that the node's configuration asks for: `native-<weights>` or `torch-<device>-<dtype>`.

    Where the native executor is asked for and cannot run (the package was built without a compiler, or the node
    computes on a GPU), PyTorch takes its place: the layout says so, and with it the node's status.
    """
    if kind == "native" and device == "cpu" and library.available():
        return NATIVE_PREFIX + weights
    return f"torch-{device}-{dtype}"
