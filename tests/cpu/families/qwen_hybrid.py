"""Qwen3-Next and Qwen3.5: gated delta nets with full attention between them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.cpu.families.harness import TINY, Family, draw_wide

RECURRENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def draw(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Norms stand around zero here; decays from slow to fast."""
    draw_wide(name, parameter, generator)
    if "norm" in name and "linear_attn" not in name:
        parameter -= 1.0
    if name.endswith("A_log"):
        parameter.uniform_(-4.0, 1.0, generator=generator)
    if name.endswith(("dt_bias", "conv1d.weight")):
        parameter.mul_(4.0)


TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "shared_expert_intermediate_size": 16}  # fmt: skip
SIGHT = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
         "num_position_embeddings": 4}  # fmt: skip


def qwen3_next() -> Any:
    """With experts in two of three layers, one of them shared, and one key head for two value heads."""
    shared = {"shared_expert_intermediate_size": 24}
    return transformers.Qwen3NextConfig(**{**TINY, **RECURRENT, **EXPERTS, **shared, "mlp_only_layers": [1]})


def qwen3_5_text() -> Any:
    more = {"tie_word_embeddings": True, "attention_bias": True}
    return transformers.Qwen3_5TextConfig(**{**TINY, **RECURRENT, **TWO_LAYERS, **more})


def qwen3_5() -> Any:
    """As published, with a vision tower, of which the text model knows nothing."""
    text = {**TINY, **RECURRENT, **TWO_LAYERS}
    return transformers.Qwen3_5Config(text_config=text, vision_config=SIGHT, tie_word_embeddings=False)


def qwen3_5_moe_text() -> Any:
    """With a shared expert as wide as two others."""
    fields = {name: value for name, value in TINY.items() if name != "intermediate_size"}
    shared = {"shared_expert_intermediate_size": 48}
    return transformers.Qwen3_5MoeTextConfig(**{**fields, **RECURRENT, **TWO_LAYERS, **EXPERTS, **shared})


def qwen3_5_moe() -> Any:
    text = {name: value for name, value in TINY.items() if name != "intermediate_size"}
    text |= {**RECURRENT, **TWO_LAYERS, **EXPERTS}
    return transformers.Qwen3_5MoeConfig(text_config=text, vision_config=SIGHT, tie_word_embeddings=False)


FAMILIES = [
    Family("qwen3_next", qwen3_next, draw=draw),
    Family("qwen3_5_text", qwen3_5_text, draw=draw),
    Family("qwen3_5", qwen3_5, draw=draw, model_class="Qwen3_5ForConditionalGeneration"),
    Family("qwen3_5_moe_text", qwen3_5_moe_text, draw=draw),
    Family("qwen3_5_moe", qwen3_5_moe, draw=draw, model_class="Qwen3_5MoeForConditionalGeneration"),
]
