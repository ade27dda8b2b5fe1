"""How this node's weights are packed: what its runtime asks for, and its model owner makes at the start."""

from tie.bones.layouts import layout_id
from tie.bones.split import Split
from tie.daemon.config import RuntimeConfig


def layout_for(runtime: RuntimeConfig) -> str:
    """The layout of the weights."""
    return layout_id(
        runtime.executor,
        dtype=runtime.dtype,
        weights=runtime.weights,
        block_tokens=runtime.block_tokens,
        ranks=runtime.ranks,
    )


def split_for(runtime: RuntimeConfig) -> Split:
    """Over how many ranks the model is split, as rank 0 sees it."""
    return Split(runtime.tensor_parallel, runtime.pipeline_parallel)
