"""Gemma 1 to 4: scaled embeddings, norms around both blocks, soft caps, alternating windows, two ropes; in 4 heads of
two sizes, keys and values shared between layers, inputs per layer, experts beside feed-forward blocks. VaultGemma
is Gemma 2 without norms behind its blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma3Config, Gemma3TextConfig, Gemma4TextConfig, GemmaConfig, VaultGemmaConfig

from tests.cpu.families.harness import TINY, Family, draw_wide

CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}  # Gemma 3 knows the first and does not use it
HEADS = {"head_dim": 16, "query_pre_attn_scalar": 20}
LINEAR = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
EYES = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
SIX_LAYERS = {**TINY, "num_hidden_layers": 6}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "final_logit_softcapping": 5.0,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 160}


def draw_around_zero(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Gemma keeps its norms less one."""
    if "norm" in name:
        parameter.normal_(0.0, 0.3, generator=generator)
    else:
        draw_wide(name, parameter, generator)


def draw_routed(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Routers wide apart, so that no choice is a near tie, though their inputs are scaled down by the width's root;
    scales away from one."""
    draw_wide(name, parameter, generator)
    if name.endswith("router.proj.weight"):
        parameter.mul_(8.0)
    elif name.endswith(("router.scale", "per_expert_scale")):
        parameter.mul_(2.0).add_(1.0)


FAMILIES = [
    Family("gemma", lambda: GemmaConfig(**TINY, head_dim=16, hidden_act="gelu_pytorch_tanh"), draw_around_zero),
    Family(
        "gemma2",
        lambda: Gemma2Config(**TINY, **HEADS, **CAPS, sliding_window=11),
        draw_around_zero,
    ),
    Family(
        "gemma3",
        lambda: Gemma3TextConfig(**SIX_LAYERS, **HEADS, **CAPS, sliding_window=9, rope_parameters=LINEAR),
        draw_around_zero,
    ),
    Family(
        "gemma3 of text and images",
        lambda: Gemma3Config(
            text_config=dict(**SIX_LAYERS, **HEADS, sliding_window=9, rope_parameters=LINEAR, model_type="gemma3_text"),
            vision_config=EYES,
            mm_tokens_per_image=4,
            tie_word_embeddings=False,
        ),
        draw_around_zero,
        model_class="Gemma3ForConditionalGeneration",
    ),
    Family(
        "gemma4",
        lambda: Gemma4TextConfig(
            **SIX_LAYERS,
            **GEMMA4,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            vocab_size_per_layer_input=256,
            hidden_size_per_layer_input=8,
        ),
    ),
    Family(
        "gemma4 keys as values",
        lambda: Gemma4TextConfig(
            **SIX_LAYERS,
            **GEMMA4,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
        ),
    ),
    Family(
        "gemma4 experts",
        lambda: Gemma4TextConfig(
            **SIX_LAYERS,
            **GEMMA4,
            **GEMMA4_EXPERTS,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
        ),
        draw_routed,
    ),
    Family("vaultgemma", lambda: VaultGemmaConfig(**TINY, **HEADS, **CAPS, sliding_window=9), draw_around_zero),
]
