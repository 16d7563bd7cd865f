"""GGUF tensor names of each architecture, and how its files differ from a Hugging Face checkpoint.

`checkpoint` reads files with them. An architecture is a line in `STYLES` (hybrids: `hybrid_styles`; architectures whose
metadata needs more than a table: `special_styles`), and one in the registry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.files.gguf import GGUFFile
from quire.models.gguf.hybrid_styles import GRANITE_BLOCKS, HYBRID_STYLES
from quire.models.gguf.metadata import get, get_flag
from quire.models.gguf.special_styles import SPECIAL_STYLES
from quire.models.gguf.style import GGUFStyle

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",  # Gemma 4, as the next two
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED = {f"ffn_{kind}_shexp": f"mlp.shared_experts.{kind}_proj" for kind in ("gate", "up", "down")}
_CHOICE_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_MIXTRAL = {name: called.replace("mlp.", "block_sparse_moe.") for name, called in _IN_LAYER.items() if "_exps" in name}
_MIXTRAL["ffn_gate_inp"] = "block_sparse_moe.gate"
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_PHI2 = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_QWEN2_SHARED = {
    **{name: called.replace("shared_experts", "shared_expert") for name, called in _SHARED.items()},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.gate_proj",
    "ffn_up_exps": "feed_forward.experts.up_proj",
    "ffn_down_exps": "feed_forward.experts.down_proj",
    "shortconv.conv": "conv.conv.taps",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_NEOX = {
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_NEOX_TOP = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_HUNYUAN_EXPERTS = {
    **{name: called.replace("shared_experts", "shared_mlp") for name, called in _SHARED.items()},
    "ffn_gate_inp": "mlp.gate.wg",
}
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def _ernie_moe(file: GGUFFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "moe_num_experts": fields["num_experts"],
        "moe_k": fields["num_experts_per_tok"],
        "moe_num_shared_experts": get(file, "expert_shared_count", 0),
        "moe_layer_start_index": get(file, "leading_dense_block_count", 1),
        "moe_layer_interval": get(file, "interleave_moe_layer_step", 1),
    }


def _gpt_neox(file: GGUFFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Converters split queries, keys and values, which checkpoints interleave by head."""
    return {"qkv_by_head": False, "use_parallel_residual": get_flag(file, "use_parallel_residual", True)}


def _olmo3(file: GGUFFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """OLMo 3 files have the architecture of OLMo 2 and differ by their windows."""
    return {} if fields["sliding_window"] is None else {"model_type": "olmo3"}


def _ministral3(file: GGUFFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the growth of queries with their position. YaRN of this model has no attention factor."""
    rope = {**fields["rope_parameters"], "llama_4_scaling_beta": get(file, "attention.temperature_scale", 0.0)}
    if get(file, "rope.scaling.yarn_log_multiplier", 0.0):
        rope["attention_factor"] = 1.0
    return {"rope_parameters": rope}


def _not_normalised(file: GGUFFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Expert weights are not normalized unless the file says so."""
    return {"norm_topk_prob": get_flag(file, "expert_weights_norm", False)}


_LFM2_TOP = {"token_embd_norm": "model.embedding_norm"}  # the final norm
_LFM2_FIELDS = {
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
}
_OFFSET_APPLIED = {"norm_offset": 0.0}  # converters have already added the 1
STYLES = {
    "arcee": GGUFStyle(permuted=True),
    "chatglm": GGUFStyle({"ffn_up": "mlp.gate_up_proj"}),
    "cohere2": GGUFStyle(metadata={"logit_scale": "logit_scale"}, has_own_windows=True),
    "command-r": GGUFStyle(metadata={"logit_scale": "logit_scale"}),
    "dots1": GGUFStyle(_SHARED, whole_names=_CHOICE_BIAS),
    "ernie4_5-moe": GGUFStyle(
        _SHARED, whole_names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}, extra_fields=_ernie_moe
    ),
    "exaone-moe": GGUFStyle(_SHARED, whole_names={"exp_probs_b.bias": "mlp.e_score_correction_bias"}),
    "exaone4": GGUFStyle(_POST_NORMS),
    "gemma": GGUFStyle(fields=_OFFSET_APPLIED),
    "gemma2": GGUFStyle(_SANDWICH_NORMS, _OFFSET_APPLIED, has_own_windows=True),
    "gemma3": GGUFStyle(_SANDWICH_NORMS, _OFFSET_APPLIED, has_own_windows=True),
    "glm4": GGUFStyle(_GLM4),
    "glm4moe": GGUFStyle({**_SHARED, "post_attention_norm": "post_attention_layernorm"}, whole_names=_CHOICE_BIAS),
    "gptneox": GGUFStyle(_NEOX, layers="gpt_neox.layers", top_names=_NEOX_TOP, extra_fields=_gpt_neox),
    "granite": GGUFStyle(permuted=True),
    "granitemoe": GGUFStyle(
        GRANITE_BLOCKS, permuted=True, metadata={"shared_intermediate_size": "expert_shared_feed_forward_length"}
    ),
    "hunyuan-dense": GGUFStyle(_HUNYUAN),
    "hunyuan-moe": GGUFStyle({**_HUNYUAN, **_HUNYUAN_EXPERTS}),
    "lfm2": GGUFStyle(
        _LFM2, {"block_auto_adjust_ff_dim": False}, top_names=_LFM2_TOP, keyless_type="conv", metadata=_LFM2_FIELDS
    ),
    "lfm2moe": GGUFStyle(
        _LFM2,
        top_names=_LFM2_TOP,
        keyless_type="conv",
        metadata=_LFM2_FIELDS,
        whole_names={"exp_probs_b.bias": "feed_forward.expert_bias"},
    ),
    "llama": GGUFStyle(_MIXTRAL, permuted=True),
    "minimax-m2": GGUFStyle(_MIXTRAL, whole_names={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}),
    "mistral3": GGUFStyle(permuted=True, extra_fields=_ministral3),
    "nemotron": GGUFStyle(fields=_OFFSET_APPLIED),
    "olmo": GGUFStyle(metadata={"clip_qkv": "attention.clamp_kqv"}, permuted=True),
    "olmo2": GGUFStyle(_SANDWICH_NORMS, extra_fields=_olmo3),
    "olmoe": GGUFStyle(metadata={"clip_qkv": "attention.clamp_kqv"}, extra_fields=_not_normalised),
    "phi2": GGUFStyle(_PHI2, top_names={"output_norm": "model.final_layernorm"}),
    "phi3": GGUFStyle({"ffn_up": "mlp.gate_up_proj"}),
    "qwen2moe": GGUFStyle(_QWEN2_SHARED, extra_fields=_not_normalised),
    "seed_oss": GGUFStyle({"post_attention_norm": "post_attention_layernorm"}),
    "smollm3": GGUFStyle(permuted=True),
    "stablelm": GGUFStyle({"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}),
    "starcoder2": GGUFStyle({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    **HYBRID_STYLES,
    **SPECIAL_STYLES,
}
PLAIN = GGUFStyle()


def style_of(arch: object) -> GGUFStyle:
    return STYLES.get(str(arch), PLAIN)


def hf_name(name: str, style: GGUFStyle = PLAIN) -> str:
    """Returns the checkpoint name of a GGUF tensor. An unknown name is unchanged, so that the loader's check reports
    it.
    """
    found = _IN_BLOCK.fullmatch(name)
    stem, _, kind = (found[2] if found else name).rpartition(".")
    if not found:
        called = style.top_names.get(stem, _TOP.get(stem))
        return f"{called}.{kind}" if called else name
    whole = style.whole_names.get(found[2])
    called = style.names.get(stem, _IN_LAYER.get(stem)) if kind in ("weight", "bias") else None
    if whole is None and called is None:
        return name
    return f"{style.layers}.{found[1]}.{whole or f'{called}.{kind}'}"
