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
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8,
    "mamba_dt_rank": 4, "state_size": 8, "time_step_rank": 4, "chunk_size": 8, "linear_num_heads": 2,
    "linear_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
LEFT_OUT = object()
SPECIAL_STYLES: dict[str, dict[str, Any]] = {  # what their defaults leave open, or can't be left to them
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 0.5},  # more: float32 is too short
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    **{
        kind: {
            "index_topk": 5,
            "index_head_dim": 16,
            "index_n_heads": 16,
        }  # with fewer heads many scores are 0, and which of them is best is anyone's guess
        for kind in ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "index_topk": 5,
        "index_head_dim": 16,
        "index_n_heads": 16,
        "shared_experts_intermediate_size": 24,
        **{f"swa_{name}": 2 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 24 for name in ("q_lora_rank", "kv_lora_rank")},
        **{f"swa_{name}": 8 for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
        "swa_head_dim": 16,
    },
    "falcon": {"head_dim": LEFT_OUT},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 256,
        "laurel_rank": 8,
        "intermediate_size": [96, 96],
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "window_size": 9,
        "num_hidden_layers": LEFT_OUT,
    },
    "gptj": {"rotary_dim": 8},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "minimax": {"sliding_window": 9},
    "longcat_flash": {"head_dim": 8, "num_layers": 1},
    "modernbert-decoder": {"pad_token_id": 0, "layer_types": ["full_attention", "sliding_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 9},
    "rwkv": {"rescale_every": 1},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0, "v_head_dim": LEFT_OUT, "autocast_kernel_dtype": "float32"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"], "attention_head_dim": 32, "mamba_dt_rank": 4},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "attention_head_dim": 32,
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "hybrid_layer_ids": [1],
        "mamba_headdim": 32,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 24, "layer_types": ["hybrid_sliding", "hybrid"],
             "sliding_window": 9},
}  # fmt: skip
RIGHT = (  # those that were seen to give the tokens of transformers; a list to hold us to
    "apertus", "axk1", "axk2", "bailing_hybrid", "beam", "biogpt", "bitnet", "bloom", "codegen",
    "cohere_compass_text", "ctrl", "dbrx", "deepseek_v32", "diffllama", "doge", "dots3_note_text", "falcon",
    "falcon_mamba", "flint", "gemma3n_text", "gemma4_unified_text", "glm_moe_dsa", "gpt-sw3", "gpt2", "gpt_bigcode",
    "gpt_neo", "gpt_neox_japanese", "gptj", "hrm_text", "hy_v4", "inkling2_text", "inkling_text", "internlm3",
    "iquestcoder", "jamba", "jetmoe", "kolibri1", "laguna", "lfm3", "llama4_text", "longcat_flash", "mamba",
    "mimo_v2_flash", "minimax", "minimax_m3_vl_text", "modernbert-decoder", "moshi", "mpt", "nanochat", "opt",
    "phimoe", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xglm", "xlstm", "zamba", "zamba2", "zaya",
)  # fmt: skip


WITH_EYES = (  # models with images, or sound, whose language model is one of these, and is published in no other way
    "aria", "cohere_compass", "hyperclovax_vision_v2", "inkling2", "inkling_mm_model", "lfm3_vl", "llama4",
    "minimax_m3_vl", "qwen4_exp",
)  # fmt: skip
EYE_SIZES = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_heads": 2, "image_size": 28, "patch_size": 14,
    "projection_dim": 32, "projector_input_dim": 32, "projector_output_dim": 64, "vision_output_dim": 64,
    "out_hidden_size": 64, "text_hidden_size": 64,
}  # fmt: skip


def other_types() -> list[str]:
    return sorted(kind for kind in CAUSAL if kind not in FAMILIES)


def small_config(model_type: str) -> Any:
    """Raises whatever transformers raises where these sizes do not make a config of the type."""
    make = CONFIG_MAPPING[model_type]
    usual = make()
    given = {**TINY, **{name: size for name, size in SIZES.items() if _has(usual, name)}}
    if hasattr(usual, "qk_rope_head_dim"):  # heads have two widths, and keys are every head's own
        given["num_key_value_heads"] = given["num_attention_heads"]
        given.pop("head_dim", None)
    given |= SPECIAL_STYLES.get(model_type, {})
    return make(**{name: value for name, value in given.items() if value is not LEFT_OUT})


def small_with_eyes(model_type: str) -> Any:
    """A small config of one of `WITH_EYES`."""
    make = CONFIG_MAPPING[model_type]
    usual = make()
    parts = [name for name in ("vision_config", "audio_config") if _has(usual, name)]
    given = {
        part: {name: size for name, size in EYE_SIZES.items() if _has(getattr(usual, part), name)} for part in parts
    }
    given["text_config"] = small_config(usual.text_config.model_type).to_dict()
    return make(**given, tie_word_embeddings=False)


def _has(config: Any, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except RuntimeError:  # each layer has its own, and a config says so rather than name one
        return True
