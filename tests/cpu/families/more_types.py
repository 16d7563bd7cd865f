"""Small configs for whatever causal model types the installed transformers has and no file of ours, made without
knowing them: sizes by the names that configs give them. `test_more_types` runs them all."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from quire.models.registry import FAMILIES
from tests.cpu.families.harness import TINY

SIZES: dict[str, Any] = {
    "d_model": 64, "head_dim": 16, "n_positions": 512, "n_ctx": 512, "ffn_dim": 96, "n_inner": 96,
    "word_embed_proj_dim": 64, "sliding_window": 9, "first_k_dense_replace": 1, "decoder_layers": 2,
    "decoder_ffn_dim": 96, "decoder_attention_heads": 4, "encoder_layers": 1, "encoder_ffn_dim": 32,
    "encoder_attention_heads": 4,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {  # what their defaults leave open, or can't be left to them
    "afmoe": {"num_dense_layers": 1},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2, "num_shared_expert": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
RIGHT = (  # those that were seen to give the tokens of transformers; a list to hold us to
    "afmoe", "apertus", "aria_text", "axk1", "beam", "bitnet", "cohere2_moe", "ctrl", "ernie4_5_moe", "flex_olmo",
    "flint", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "kolibri1", "laguna",
    "mellum", "mimo_v2_flash", "minicpm3", "minimax_m3_vl_text", "ministral3", "nanochat", "opt", "persimmon",
    "phimoe", "vaultgemma", "youtu",
)  # fmt: skip


def other_types() -> list[str]:
    return sorted(kind for kind in CAUSAL if kind not in FAMILIES)


def small_config(model_type: str) -> Any:
    """Raises whatever transformers raises where these sizes do not make a config of the type."""
    make = CONFIG_MAPPING[model_type]
    usual = make()
    given = {**TINY, **{name: size for name, size in SIZES.items() if getattr(usual, name, None) is not None}}
    if hasattr(usual, "qk_rope_head_dim"):  # heads have two widths, and keys are every head's own
        given["num_key_value_heads"] = given["num_attention_heads"]
        given.pop("head_dim", None)
    return make(**{**given, **SPECIAL.get(model_type, {})})
