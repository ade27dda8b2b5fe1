"""Small random models of every supported kind, as transformers has them and as bones has them, in float32."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tie.bones.config import ModelConfig, RopeScaling

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that the test's positions reach frequencies that are stretched, kept and blended.
    "original_max_position_embeddings": 64,
}


class Case(NamedTuple):
    model: PreTrainedModel
    config: ModelConfig
    tensors: dict[str, torch.Tensor]


def _case(config_class: Any, model_class: Any, ours: dict[str, Any], **theirs: Any) -> Case:
    shape = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "vocab_size": 211,
        "rms_norm_eps": 1e-5,
    }
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": ours.pop("head_dim", 16), "num_layers": 3}
    torch.manual_seed(7)
    reference = config_class(
        **shape,
        num_hidden_layers=heads["num_layers"],
        num_attention_heads=heads["num_heads"],
        num_key_value_heads=heads["num_kv_heads"],
        head_dim=heads["head_dim"],
        max_position_embeddings=1024,
        initializer_range=0.3,  # large, so that attention is far from uniform and mistakes show
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **theirs,
    )
    model = model_class(reference).eval().float()
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide a missing one
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                base = 1.0 if "norm" in name else 0.0
                parameter.copy_(base + 0.3 * torch.randn_like(parameter))
    tensors = dict(model.state_dict())
    if ours.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    config = ModelConfig(**shape, **heads, context_tokens=1024, **({"rope_theta": 10000.0} | ours))
    return Case(model, config, tensors)


CASES: dict[str, Callable[[], Case]] = {
    "llama": lambda: _case(
        LlamaConfig,
        LlamaForCausalLM,
        {"kind": "llama"},
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    ),
    "llama-tied-biased": lambda: _case(
        LlamaConfig,
        LlamaForCausalLM,
        {"kind": "llama", "tie_word_embeddings": True, "attention_bias": True},
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "llama3-rope": lambda: _case(
        LlamaConfig,
        LlamaForCausalLM,
        {"kind": "llama", "rope_theta": 500000.0, "rope_scaling": RopeScaling.from_object(LLAMA3)},
        rope_parameters={**LLAMA3, "rope_theta": 500000.0},
        tie_word_embeddings=False,
    ),
    "llama-linear-rope": lambda: _case(
        LlamaConfig,
        LlamaForCausalLM,
        {"kind": "llama", "rope_scaling": RopeScaling.from_object({"type": "linear", "factor": 4.0})},
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        tie_word_embeddings=False,
    ),
    "mistral": lambda: _case(
        MistralConfig,
        MistralForCausalLM,
        {"kind": "mistral", "sliding_window": 21},
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        sliding_window=21,
        tie_word_embeddings=False,
    ),
    "qwen2": lambda: _case(
        Qwen2Config,
        Qwen2ForCausalLM,
        {"kind": "qwen2", "rope_theta": 1000000.0, "attention_bias": True, "tie_word_embeddings": True},
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
    ),
    "qwen3": lambda: _case(
        Qwen3Config,
        Qwen3ForCausalLM,
        {"kind": "qwen3", "rope_theta": 1000000.0, "qk_norm": True, "head_dim": 32},
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
    ),
}


def greedy(case: Case, prompt: list[int], count: int) -> list[int]:
    """What transformers answers to a prompt."""
    with torch.inference_mode():
        return case.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
