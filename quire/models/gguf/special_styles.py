"""Styles of GGUF architectures whose metadata needs more than a table: gpt-oss, Gemma 4 and DeepSeek, including models
that convert to its architecture. `tensor_names` includes these styles in its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.files.gguf import GGUFFile
from quire.models.gguf.metadata import bad_metadata, get, get_flag, get_per_layer, key_of, need
from quire.models.gguf.style import GGUFStyle
from quire.types import QuireError

Fields = Mapping[str, Any]

# ---------------------------------------------------------------------------------------------------------------------
# gpt-oss

_GPT_OSS = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}


def _gpt_oss(file: GGUFFile, fields: Fields) -> Fields:
    """gpt-oss' YaRN ramp is not truncated, which files do not say."""
    return {
        "intermediate_size": need(file, "expert_feed_forward_length"),
        "num_local_experts": need(file, "expert_count"),
        "sliding_window": need(file, "attention.sliding_window"),
        "rope_parameters": {**fields["rope_parameters"], "truncate": False},
    }


# ---------------------------------------------------------------------------------------------------------------------
# Gemma 4

_GEMMA4 = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
}
_GEMMA4_WHOLE = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
}


def _gemma4(file: GGUFFile, fields: Fields) -> Fields:
    """Layers with a window and full-attention layers differ in head size and rope."""
    num_layers = fields["num_hidden_layers"]
    pattern = get_per_layer(file, "attention.sliding_window_pattern")
    kv_heads = get_per_layer(file, "attention.head_count_kv")
    wide_dim, head_dim = need(file, "attention.key_length"), need(file, "attention.key_length_swa")
    num_shared = get(file, "attention.shared_kv_layers", 0)
    if not 0 <= num_shared < num_layers:
        raise bad_metadata(file, "attention.shared_kv_layers")
    inner_width, is_double = _gemma4_widths(file, num_layers, num_shared)
    inputs = file.tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in pattern],
        "sliding_window": need(file, "attention.sliding_window"),
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": {
            index: {"head_dim": head_dim if has_window else wide_dim, "num_key_value_heads": heads}
            for index, (has_window, heads) in enumerate(zip(pattern, kv_heads, strict=True))
        },
        "num_kv_shared_layers": num_shared,
        "attention_k_eq_v": any(
            not has_window and f"blk.{index}.attn_v.weight" not in file.tensors
            for index, has_window in enumerate(pattern[: num_layers - num_shared])
        ),
        "intermediate_size": inner_width,
        "use_double_wide_mlp": is_double,
        "hidden_size_per_layer_input": get(file, "embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": None if inputs is None else inputs.shape[0],
        "rope_parameters": _gemma4_ropes(file, fields["rope_parameters"]),
        "enable_moe_block": "num_experts" in fields,
        "top_k_experts": fields.get("num_experts_per_tok"),
    }


def _gemma4_widths(file: GGUFFile, num_layers: int, num_shared: int) -> tuple[int, bool]:
    """Returns the width of feed-forward blocks, and whether it is doubled in layers that share keys and values."""
    widths = get_per_layer(file, "feed_forward_length")
    for is_double in (False, True):
        of_shared = 2 * widths[0] if is_double else widths[0]
        if widths == [widths[0]] * (num_layers - num_shared) + [of_shared] * num_shared:
            return widths[0], is_double
    raise bad_metadata(file, "feed_forward_length")


def _gemma4_ropes(file: GGUFFile, rope: Fields) -> Fields:
    """Files encode the pairs that rope does not rotate by divisors close to infinity."""
    if "divisors" not in rope:
        what = f"{file.path} lacks the tensor rope_freqs.weight."
        raise QuireError("bad_weights", what, "Fetch or convert it again.")
    theta = get(file, "rope.freq_base_swa", 10000.0)
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


# ---------------------------------------------------------------------------------------------------------------------
# DeepSeek V2 and V3, Kimi K2, GLM-4.7 Flash: one architecture

_DEEPSEEK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # older files
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}
_SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func
# tokenizer -> model_type, the only difference from DeepSeek V3
_BY_TOKENIZER = {"glm4": "glm4_moe_lite", "kimi-k2": "kimi_k2"}
_GROUPS = {160: (8, 3), 256: (8, 4)}  # experts -> groups, in files of DeepSeek models that do not say


def _deepseek(file: GGUFFile, fields: Fields) -> Fields:
    if key_of(file, "attention.temperature_scale") in file.metadata:
        what = f"{file.path} has {key_of(file, 'attention.temperature_scale')}, which is not supported."
        raise QuireError("unsupported_model", what, "Use another model.")
    ranked = key_of(file, "attention.q_lora_rank") in file.metadata
    return {
        "layer_types": None,
        "q_lora_rank": need(file, "attention.q_lora_rank") if ranked else None,
        "kv_lora_rank": need(file, "attention.kv_lora_rank"),
        **_head_sizes(file),
        "first_k_dense_replace": get(file, "leading_dense_block_count", 0),
        **_deepseek_experts(file, fields["num_hidden_layers"]),
        "rope_parameters": _deepseek_rope(file, fields["rope_parameters"]),
    }


def _head_sizes(file: GGUFFile) -> Fields:
    """Newer files give the cache's sizes under the plain keys and heads' sizes under `_mla`; older files give heads'
    sizes.
    """
    newer = "_mla" if key_of(file, "attention.key_length_mla") in file.metadata else ""
    rope_dim = need(file, "rope.dimension_count")
    nope_dim = need(file, f"attention.key_length{newer}") - rope_dim
    if nope_dim < 1:
        raise bad_metadata(file, f"attention.key_length{newer}")
    value_dim = need(file, f"attention.value_length{newer}")
    return {"qk_rope_head_dim": rope_dim, "qk_nope_head_dim": nope_dim, "v_head_dim": value_dim}


def _deepseek_experts(file: GGUFFile, num_layers: int) -> Fields:
    num_experts = need(file, "expert_count")
    has_bias = f"blk.{num_layers - 1}.exp_probs_b.bias" in file.tensors
    score = get(file, "expert_gating_func", _SIGMOID if has_bias else _SOFTMAX)
    normed = get_flag(file, "expert_weights_norm", False)
    if score not in (_SOFTMAX, _SIGMOID):
        raise bad_metadata(file, "expert_gating_func")
    if score == _SOFTMAX and normed:  # DeepSeek V2 does not normalize
        raise bad_metadata(file, "expert_weights_norm")
    num_groups, top_groups = _GROUPS.get(num_experts, (1, 1))
    if key_of(file, "expert_group_count") in file.metadata:
        num_groups, top_groups = need(file, "expert_group_count"), need(file, "expert_group_used_count")
    v3 = _BY_TOKENIZER.get(str(file.metadata.get("tokenizer.ggml.pre")), "deepseek_v3")
    return {
        "model_type": v3 if score == _SIGMOID else "deepseek_v2",
        "topk_method": "noaux_tc" if score == _SIGMOID else "group_limited_greedy",
        "n_routed_experts": num_experts,
        "n_shared_experts": get(file, "expert_shared_count", 0),
        "moe_intermediate_size": need(file, "expert_feed_forward_length"),
        "norm_topk_prob": normed,
        "routed_scaling_factor": get(file, "expert_weights_scale", 1.0),
        "n_group": num_groups,
        "topk_group": top_groups,
    }


def _deepseek_rope(file: GGUFFile, rope: Fields) -> Fields:
    """Files hold a tenth of the scores' `mscale`. The scale of angles is 1 in every published model."""
    score_factor = get(file, "rope.scaling.yarn_log_multiplier", 0.0) * 10
    return {**rope, "mscale": score_factor, "mscale_all_dim": score_factor} if score_factor else rope


SPECIAL_STYLES = {
    "deepseek2": GGUFStyle(
        _DEEPSEEK,
        whole_names={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        read_apart=frozenset({"attention.value_length"}),
        extra_fields=_deepseek,
    ),
    "gemma4": GGUFStyle(
        _GEMMA4,
        whole_names=_GEMMA4_WHOLE,
        read_apart=frozenset({"feed_forward_length", "attention.head_count_kv"}),
        extra_fields=_gemma4,
    ),
    "gpt-oss": GGUFStyle(
        _GPT_OSS,
        has_own_windows=True,
        whole_names={"attn_sinks.weight": "self_attn.sinks"},
        read_apart=frozenset({"feed_forward_length"}),
        extra_fields=_gpt_oss,
    ),
}
