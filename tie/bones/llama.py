"""The Llama family: Llama, SmolLM2, Mistral (sliding window), Qwen2 (biases), Qwen3 (normalised queries and keys)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import embedding, linear

from tie.bones.attention import Attention, P_contra
from tie.bones.config import ModelConfig
from tie.bones.errors import WeightsError
from tie.bones.layers import Rope, rms_norm, swiglu
from tie.bones.split import ALONE, Split
from tie.bones.vision.config import vision_shapes


class Llama(Generic[P_contra]):
    """A decoder over flat rows. The residual stream is float32; matrix products and the KV cache are of `dtype`.

    Args:
        config: of the model.
        tensors: under Hugging Face's names, with the shapes of `tensor_shapes`; matrices of `dtype`.
        attention: over the pool that keeps this model's keys and values.
        dtype: of matrix products.
        device: where the weights are copied to, matrices with the same input as one; None: they are used in place,
            wherever they lie.
        split: which part of the model this is.
        reduce: sums what the shards of a layer have each computed of it; None: there is one.

    Raises:
        ConfigError: the model cannot be split so.
        WeightsError: a tensor is missing, unknown, or has the wrong shape or dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        attention: Attention[P_contra],
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        split: Split = ALONE,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        _check(config, tensors, dtype)
        config, tensors = split.config(config), split.tensors(config, tensors)
        self._config = config
        self._reduce = reduce
        self._attention = attention
        self._dtype = dtype
        self._rope = Rope(config, dtype, device)
        (self._embedding,) = _placed([tensors["model.embed_tokens.weight"]], device)
        self._layers = [_layer(config, tensors, number, dtype, device) for number in range(config.num_layers)]
        self._norm = _vector(tensors["model.norm.weight"], device)
        self._head = self._embedding
        if "lm_head.weight" in tensors:
            (self._head,) = _placed([tensors["lm_head.weight"]], device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor,
        plan: P_contra,
        given: Sequence[tuple[int, Tensor]] = (),
    ) -> Tensor:
        """Runs the rows of one batch through all layers.

        Args:
            tokens: `[rows]` int64.
            positions: `[rows]` int64.
            wanted: `[n]` int64, the rows that need logits.
            plan: of the attention, for these rows.
            given: runs of rows that are vectors already, in the place of their tokens' embeddings: the first row's
                number, and `[n, hidden_size]` float32.

        Returns:
            Logits, `[n, vocab_size]` float32.
        """
        return self.logits(self.layers(self.embed(tokens, given), positions, plan), wanted)

    def embed(self, tokens: Tensor, given: Sequence[tuple[int, Tensor]] = ()) -> Tensor:
        """The residual stream of rows before the first layer, `[rows, hidden_size]` float32. Arguments as `forward`."""
        x = embedding(tokens, self._embedding).float()
        for first, vectors in given:
            x[first : first + len(vectors)] = vectors
        return x

    def layers(self, x: Tensor, positions: Tensor, plan: P_contra) -> Tensor:
        """The residual stream behind all layers of this part, in the memory of `x`. Arguments as `forward`."""
        eps, dtype, reduce = self._config.rms_norm_eps, self._dtype, self._reduce
        tables = self._rope.tables(positions)
        for number, layer in enumerate(self._layers):
            h = rms_norm(x, layer.attention_norm, eps, dtype)
            qkv = self._project(layer, h, tables)
            mixed = linear(self._attention.attend(plan, number, qkv), layer.o, layer.o_bias)
            x += mixed if reduce is None else reduce(mixed)

            h = rms_norm(x, layer.feed_forward_norm, eps, dtype)
            products = [linear(h, matrix) for matrix in layer.gate_up]
            gate, up = products if len(products) > 1 else products[0].chunk(2, -1)
            fed = linear(swiglu(gate, up), layer.down)
            x += fed if reduce is None else reduce(fed)
        return x

    def logits(self, x: Tensor, wanted: Tensor) -> Tensor:
        """Logits of the wanted rows, `[n, vocab_size]` float32, or a shard's columns of them."""
        h = rms_norm(x[wanted], self._norm, self._config.rms_norm_eps, self._dtype)
        return linear(h, self._head).float()

    def _project(self, layer: "_Layer", h: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Queries, keys and values of all rows, `[rows, num_heads + 2 * num_kv_heads, head_dim]`, rotated."""
        config = self._config
        parts = [linear(h, matrix, bias) for matrix, bias in zip(layer.qkv, layer.qkv_bias, strict=True)]
        qkv = (torch.cat(parts, -1) if len(parts) > 1 else parts[0]).view(len(h), -1, config.head_dim)
        rotated = qkv[:, : config.num_heads + config.num_kv_heads]
        if layer.qk_norm is not None:
            normal = functional.rms_norm(rotated.float(), (config.head_dim,), None, config.rms_norm_eps)
            rotated.copy_(normal.mul_(layer.qk_norm))
        self._rope.rotate_(rotated, tables)
        return qkv


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The weights of one decoder layer. Norms are float32; `qk_norm` is `[num_heads + num_kv_heads, head_dim]`.

    `qkv` and `gate_up` are several matrices where these lie apart, in somebody else's memory, else one.
    """

    attention_norm: Tensor
    qkv: Sequence[Tensor]
    qkv_bias: Sequence[Tensor | None]
    o: Tensor
    o_bias: Tensor | None
    qk_norm: Tensor | None
    feed_forward_norm: Tensor
    gate_up: Sequence[Tensor]
    down: Tensor


def _layer(
    config: ModelConfig, tensors: Mapping[str, Tensor], number: int, dtype: torch.dtype, device: torch.device | None
) -> _Layer:
    prefix = f"model.layers.{number}."

    def matrices(*names: str) -> Sequence[Tensor]:
        return _placed([tensors[f"{prefix}{name}.weight"] for name in names], device)

    def norm(name: str) -> Tensor:
        return _vector(tensors[f"{prefix}{name}.weight"], device)

    def biases(*names: str) -> Sequence[Tensor | None]:
        found = [tensors[key].to(dtype) for name in names if (key := f"{prefix}{name}.bias") in tensors]
        return _placed(found, device) if found else [None] * (1 if device else len(names))

    qk_norm = None
    if config.qk_norm:
        heads = (
            norm("self_attn.q_norm").expand(config.num_heads, -1),
            norm("self_attn.k_norm").expand(config.num_kv_heads, -1),
        )
        qk_norm = torch.cat(heads)
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    (o,), (o_bias,), (down,) = matrices("self_attn.o_proj"), biases("self_attn.o_proj"), matrices("mlp.down_proj")
    return _Layer(
        attention_norm=norm("input_layernorm"),
        qkv=matrices(*projections),
        qkv_bias=biases(*projections),
        o=o,
        o_bias=o_bias,
        qk_norm=qk_norm,
        feed_forward_norm=norm("post_attention_layernorm"),
        gate_up=matrices("mlp.gate_proj", "mlp.up_proj"),
        down=down,
    )


def _vector(values: Tensor, device: torch.device | None) -> Tensor:
    """As float32, where it is or on a device."""
    return values.to(device, torch.float32, copy=device is not None)


def _placed(parts: Sequence[Tensor], device: torch.device | None) -> Sequence[Tensor]:
    """The parts where they are; or on a device, one behind another as one tensor."""
    if device is None:
        return parts
    whole = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=parts[0].dtype, device=device)
    for target, part in zip(torch.split(whole, [len(part) for part in parts]), parts, strict=True):
        target.copy_(part)
    return (whole,)


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
    return shapes | (vision_shapes(config.vision, hidden) if config.vision else {})


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
