"""A SigLIP tower and its connector with PyTorch: pixels in, vectors for the language model out."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from tie.bones.arena import Bytes
from tie.bones.batch import Floats
from tie.bones.errors import InputError
from tie.bones.vision.config import VisionConfig


class VisionEncoder:
    """Encodes squares of pixels. The residual stream is float32; matrix products are of `dtype`, as in `Llama`.

    Not thread-safe. Tensors are used where they lie.

    Args:
        config: of tower and connector.
        tensors: those of `vision_shapes`, checked by the caller.
        dtype: of matrix products.
    """

    def __init__(self, config: VisionConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.config = config
        self._dtype = dtype
        self._tensors = tensors
        # Vectors are few: as float32 where they are added to or scale the residual stream, else as the products are.
        self._vectors = {name: tensor.to(self._kind(name)) for name, tensor in tensors.items() if tensor.dim() == 1}
        self._mean = torch.tensor(config.image_mean, dtype=torch.float32)
        self._std = torch.tensor(config.image_std, dtype=torch.float32)

    def encode(self, tiles: Bytes) -> Floats:
        """Vectors of squares.

        Args:
            tiles: `[n, image_size, image_size, 3]`.

        Returns:
            `[n, tokens, width of the language model]`.

        Raises:
            InputError: another shape or dtype.
        """
        side = self.config.image_size
        if tiles.dtype != np.uint8 or tiles.shape[1:] != (side, side, 3) or not len(tiles):
            raise InputError("a square of pixels has another size than the vision tower takes")
        with torch.inference_mode():
            vectors: Floats = self._connect(self._tower(self._patches(torch.tensor(tiles)))).float().numpy()
        return vectors

    def _patches(self, tiles: Tensor) -> Tensor:
        """`[n, patches, 3 * patch * patch]`, normalised, colour by colour as the kernel has them."""
        grid, patch = self.config.grid, self.config.patch_size
        values = (tiles.float() / 255 - self._mean) / self._std
        parts = values.view(-1, grid, patch, grid, patch, 3).permute(0, 1, 3, 5, 2, 4)
        return parts.reshape(len(tiles), grid * grid, 3 * patch * patch).to(self._dtype)

    def _tower(self, patches: Tensor) -> Tensor:
        embedded = self._linear(patches, "vision_model.embeddings.patch_embedding")
        x = embedded.float() + self._tensors["vision_model.embeddings.position_embedding.weight"].float()
        for number in range(self.config.num_layers):
            prefix = f"vision_model.encoder.layers.{number}."
            x = x + self._attend(self._norm(x, f"{prefix}layer_norm1"), f"{prefix}self_attn.")
            h = self._linear(self._norm(x, f"{prefix}layer_norm2"), f"{prefix}mlp.fc1")
            x = x + self._linear(gelu(h, approximate="tanh"), f"{prefix}mlp.fc2")
        return self._norm(x, "vision_model.post_layernorm") if self.config.final_norm else x.to(self._dtype)

    def _attend(self, h: Tensor, prefix: str) -> Tensor:
        """Every patch sees every other of its square."""
        count, length, hidden = h.shape
        heads = self.config.num_heads
        queries, keys, values = (
            self._linear(h, f"{prefix}{name}_proj").view(count, length, heads, -1).transpose(1, 2) for name in "qkv"
        )
        mixed = scaled_dot_product_attention(queries, keys, values)
        return self._linear(mixed.transpose(1, 2).reshape(count, length, hidden), f"{prefix}out_proj")

    def _connect(self, h: Tensor) -> Tensor:
        if self.config.connector == "mlp":
            h = gelu(self._linear(h, "multi_modal_projector.linear_1"))
            return self._linear(h, "multi_modal_projector.linear_2")
        # Squares of patches become one vector: row by row of the square, column by column within a row.
        factor, grid = self.config.scale_factor, self.config.grid // self.config.scale_factor
        parts = h.view(len(h), grid, factor, grid, factor, -1).permute(0, 1, 3, 2, 4, 5)
        return self._linear(parts.reshape(len(h), grid * grid, -1), "connector.modality_projection.proj")

    def _linear(self, h: Tensor, name: str) -> Tensor:
        return linear(h, self._tensors[f"{name}.weight"], self._vectors.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._vectors[f"{name}.weight"], self._vectors[f"{name}.bias"]
        return layer_norm(x, weight.shape, weight, bias, self.config.layer_norm_eps).to(self._dtype)

    def _kind(self, name: str) -> torch.dtype:
        return torch.float32 if "norm" in name else self._dtype
