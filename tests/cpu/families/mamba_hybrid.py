"""Mamba2 alone, and the hybrids that are built of it: Nemotron-H, Bamba, Granite 4, Falcon-H1."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.cpu.families.harness import TINY, Family, draw_wide

# Before 5.23 transformers norms the output of some as one part, whatever their groups, which is another model.
GROUPS = 2 if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23) else 1


def draw(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Decays from slow to fast."""
    draw_wide(name, parameter, generator)
    if name.endswith("A_log"):
        parameter.uniform_(-3.0, 1.0, generator=generator)
    if name.endswith(("dt_bias", "conv1d.weight", "conv1d.bias", ".D")):
        parameter.mul_(4.0)


def mamba2() -> Any:
    fields = {name: TINY[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")}
    return transformers.Mamba2Config(**fields, pad_token_id=0, num_hidden_layers=2, state_size=16, num_heads=8,
                                     head_dim=16, expand=2, n_groups=GROUPS, chunk_size=16)  # fmt: skip


def nemotron_h() -> Any:
    fields = {name: value for name, value in TINY.items() if name != "num_hidden_layers"}
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention"]
    return transformers.NemotronHConfig(**{**fields, "pad_token_id": 0}, layers_block_type=kinds, head_dim=16,
                                        ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=12, n_groups=4,
                                        chunk_size=16)  # fmt: skip


def nemotron_h_moe() -> Any:
    """Experts in groups and in a narrower space; the older names of the layer types."""
    fields = {name: value for name, value in TINY.items() if name != "num_hidden_layers"}
    return transformers.NemotronHConfig(**{**fields, "pad_token_id": 0}, hybrid_override_pattern="ME*", head_dim=16,
                                        ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=12, n_groups=4,
                                        chunk_size=16, n_routed_experts=8, num_experts_per_tok=2, n_group=4,
                                        topk_group=2, routed_scaling_factor=2.5, moe_intermediate_size=24,
                                        moe_shared_expert_intermediate_size=40, moe_latent_size=32)  # fmt: skip


def bamba() -> Any:
    return transformers.BambaConfig(**{**TINY, "num_hidden_layers": 2, "pad_token_id": 0}, attn_layer_indices=[1],
                                    mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=GROUPS, mamba_d_state=16,
                                    mamba_chunk_size=16)  # fmt: skip


def granite() -> Any:
    """With experts and all its scales; the one without rope."""
    return transformers.GraniteMoeHybridConfig(
        **{**TINY, "tie_word_embeddings": True}, layer_types=["linear_attention", "full_attention"],
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=40, mamba_n_heads=8, mamba_d_head=16,
        mamba_n_groups=GROUPS, mamba_d_state=16, mamba_chunk_size=16, embedding_multiplier=3.0, logits_scaling=0.5,
        residual_multiplier=0.6, attention_multiplier=0.2,
    )  # fmt: skip


def falcon_h1() -> Any:
    """All its multipliers; gated and not normed."""
    return falcon(mamba_d_ssm=96, mamba_d_head=12)


def falcon_h1_normed() -> Any:
    """Normed, then gated; biases everywhere; as wide as `mamba_expand` says."""
    return falcon(mamba_d_ssm=None, mamba_d_head=16, mamba_rms_norm=True, mamba_norm_before_gate=True,
                  mamba_proj_bias=True, projectors_bias=True, attention_bias=True, mlp_bias=True)  # fmt: skip


def falcon(**fields: Any) -> Any:
    return transformers.FalconH1Config(
        **{**TINY, "pad_token_id": 0}, **fields, mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=16,
        mamba_chunk_size=16, mlp_multipliers=[1.7, 0.6], ssm_multipliers=[0.7, 1.3, 1.2, 0.8, 1.5],
        attention_in_multiplier=1.4, attention_out_multiplier=0.7, key_multiplier=0.6, ssm_in_multiplier=1.3,
        ssm_out_multiplier=0.8, embedding_multiplier=2.0, lm_head_multiplier=0.5,
    )  # fmt: skip


FAMILIES = [
    Family("mamba2", mamba2, draw=draw),
    Family("nemotron_h", nemotron_h, draw=draw),
    Family("nemotron_h experts", nemotron_h_moe, draw=draw),
    Family("bamba", bamba, draw=draw),
    Family("granitemoehybrid", granite, draw=draw),
    Family("falcon_h1", falcon_h1, draw=draw),
    Family("falcon_h1 normed", falcon_h1_normed, draw=draw, slow=True),
]
