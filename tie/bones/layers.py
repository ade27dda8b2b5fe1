"""The small layers that every Llama is made of: RMSNorm, rotary embedding, SwiGLU."""

import torch
from torch import Tensor
from torch.nn import functional

from tie.bones.config import ModelConfig
from tie.bones.rope import rope_frequencies


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467).

    Args:
        x: `[rows, width]` float32, the residual stream.
        weight: `[width]` float32.
        eps: added to the mean square.
        dtype: of the result, which feeds a matrix product.
    """
    return functional.rms_norm(x, weight.shape, weight, eps).to(dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202), in the memory of `gate`."""
    return functional.silu(gate, inplace=True).mul_(up)


class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) on half-split heads, as Hugging Face stores them.

    Args:
        config: of the model.
        dtype: in which heads are rotated.
        device: where; None: the CPU.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self._frequencies = torch.from_numpy(rope_frequencies(config)).to(device)
        self._half = config.head_dim // 2
        self._dtype = dtype

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines for one forward pass, `[rows, 1, head_dim]` each; shared by all layers.

        Args:
            positions: `[rows]` int64.
        """
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]

    def rotate_(self, heads: Tensor, tables: tuple[Tensor, Tensor]) -> None:
        """Rotates `heads` `[rows, heads, head_dim]` in place."""
        cos, sin = tables
        swapped = torch.cat((heads[..., self._half :], heads[..., : self._half]), -1)
        heads.mul_(cos).addcmul_(swapped, sin)
