"""The Llama family: Llama, SmolLM2, Mistral (sliding window), Qwen2 (biases), Qwen3 (normalised queries and keys)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import embedding, linear

from tie.bones.attention import Attention, Plan
from tie.bones.config import ModelConfig
from tie.bones.errors import WeightsError
from tie.bones.layers import Rope, rms_norm, swiglu


class Llama:
    """A decoder over flat rows. The residual stream is float32; matrix products and the KV cache are of `dtype`.

    Args:
        config: of the model.
        tensors: under Hugging Face's names, with the shapes of `tensor_shapes`; matrices of `dtype`. Matrices are used
            in place, wherever they lie.
        attention: over the pool that keeps this model's keys and values.
        dtype: of matrix products.

    Raises:
        WeightsError: a tensor is missing, unknown, or has the wrong shape or dtype.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], attention: Attention, dtype: torch.dtype
    ) -> None:
        _check(config, tensors, dtype)
        self._config = config
        self._attention = attention
        self._dtype = dtype
        self._rope = Rope(config, dtype)
        self._embedding = tensors["model.embed_tokens.weight"]
        self._layers = [_layer(config, tensors, number, dtype) for number in range(config.num_layers)]
        self._norm = tensors["model.norm.weight"].float()
        self._head = self._embedding if config.tie_word_embeddings else tensors["lm_head.weight"]

    def forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor, plan: Plan) -> Tensor:
        """Runs the rows of one batch through all layers.

        Args:
            tokens: `[rows]` int64.
            positions: `[rows]` int64.
            wanted: `[n]` int64, the rows that need logits.
            plan: of the attention, for these rows.

        Returns:
            Logits, `[n, vocab_size]` float32.
        """
        eps, dtype = self._config.rms_norm_eps, self._dtype
        tables = self._rope.tables(positions)
        x = embedding(tokens, self._embedding).float()
        for number, layer in enumerate(self._layers):
            h = rms_norm(x, layer.attention_norm, eps, dtype)
            qkv = self._project(layer, h, tables)
            mixed = self._attention.attend(plan, number, qkv)
            x += linear(mixed, layer.o, layer.o_bias)

            h = rms_norm(x, layer.feed_forward_norm, eps, dtype)
            x += linear(swiglu(linear(h, layer.gate), linear(h, layer.up)), layer.down)
        h = rms_norm(x[wanted], self._norm, eps, dtype)
        return linear(h, self._head).float()

    def _project(self, layer: "_Layer", h: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Queries, keys and values of all rows, `[rows, num_heads + 2 * num_kv_heads, head_dim]`, rotated."""
        config = self._config
        parts = (
            linear(h, layer.q, layer.q_bias),
            linear(h, layer.k, layer.k_bias),
            linear(h, layer.v, layer.v_bias),
        )
        qkv = torch.cat(parts, -1).view(len(h), -1, config.head_dim)
        rotated = qkv[:, : config.num_heads + config.num_kv_heads]
        if layer.qk_norm is not None:
            normal = functional.rms_norm(rotated.float(), (config.head_dim,), None, config.rms_norm_eps)
            rotated.copy_(normal.mul_(layer.qk_norm))
        self._rope.rotate_(rotated, tables)
        return qkv


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The weights of one decoder layer. Norms are float32; `qk_norm` is `[num_heads + num_kv_heads, head_dim]`."""

    attention_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    o_bias: Tensor | None
    qk_norm: Tensor | None
    feed_forward_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def _layer(config: ModelConfig, tensors: Mapping[str, Tensor], number: int, dtype: torch.dtype) -> _Layer:
    prefix = f"model.layers.{number}."

    def matrix(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"]

    def norm(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"].float()

    def bias(name: str) -> Tensor | None:
        found = tensors.get(f"{prefix}{name}.bias")
        return None if found is None else found.to(dtype)

    qk_norm = None
    if config.qk_norm:
        heads = (
            norm("self_attn.q_norm").expand(config.num_heads, -1),
            norm("self_attn.k_norm").expand(config.num_kv_heads, -1),
        )
        qk_norm = torch.cat(heads)
    return _Layer(
        attention_norm=norm("input_layernorm"),
        q=matrix("self_attn.q_proj"),
        k=matrix("self_attn.k_proj"),
        v=matrix("self_attn.v_proj"),
        o=matrix("self_attn.o_proj"),
        q_bias=bias("self_attn.q_proj"),
        k_bias=bias("self_attn.k_proj"),
        v_bias=bias("self_attn.v_proj"),
        o_bias=bias("self_attn.o_proj"),
        qk_norm=qk_norm,
        feed_forward_norm=norm("post_attention_layernorm"),
        gate=matrix("mlp.gate_proj"),
        up=matrix("mlp.up_proj"),
        down=matrix("mlp.down_proj"),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this configuration has, by Hugging Face's name, with its shape."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for number in range(config.num_layers):
        prefix = f"model.layers.{number}."
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
            if config.attention_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, q_rows)
        if config.output_bias:
            shapes[f"{prefix}self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (dim,)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def _check(config: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        if name not in tensors:
            raise WeightsError(f"the tensor {name} is missing")
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"the tensor {name} has shape {tuple(tensor.shape)}, not {shape}")
        if not tensor.is_floating_point() or (tensor.dim() > 1 and tensor.dtype != dtype):
            raise WeightsError(f"the tensor {name} is {tensor.dtype}, not {dtype}")
    # A tensor that is not known, say a bias of the feed-forward layer, means another architecture: compute no nonsense.
    if extra := len(tensors.keys() - shapes.keys()):
        raise WeightsError(f"there are {extra} tensors that a model of this configuration does not have")
