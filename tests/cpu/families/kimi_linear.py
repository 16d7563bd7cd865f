"""Kimi Linear: delta nets whose channels decay one by one, with latent attention between them."""

from __future__ import annotations

from typing import Any

from transformers import KimiLinearConfig

from tests.cpu.families.harness import TINY, Family
from tests.cpu.families.mamba_hybrid import draw

SIZES: dict[str, Any] = {
    **TINY, "num_key_value_heads": 4, "pad_token_id": 0, "linear_num_heads": 3, "linear_head_dim": 20,
    "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_local_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "rms_norm_eps": 1e-3,
}  # fmt: skip


def as_published() -> Any:
    """The first layer has no experts, and queries no low rank."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return KimiLinearConfig(**{**SIZES, "num_hidden_layers": 3}, layer_types=kinds)


def grouped() -> Any:
    """Experts in groups and in every layer, two shared; queries through a low rank, biases; attention comes last."""
    return KimiLinearConfig(
        **SIZES, layer_types=["linear_attention", "full_attention"], mlp_layer_types=["sparse", "sparse"], n_group=4,
        topk_group=2, n_shared_experts=2, routed_scaling_factor=1.3, norm_topk_prob=False, q_lora_rank=24,
        attention_bias=True, linear_conv_kernel_dim=3,
    )  # fmt: skip


FAMILIES = [
    Family("kimi_linear", as_published, draw=draw),
    Family("kimi_linear grouped", grouped, draw=draw, slow=True),
]
