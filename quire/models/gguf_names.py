"""What GGUF files of each architecture call their tensors, and where they differ from a Hugging Face checkpoint.

`models.gguf` reads files with it. An architecture is a line in `STYLES`, and one in the registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.files.gguf import GGUFFile

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",  # of LFM2, which norms its output with it
    "output": "lm_head",
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
_MIXTRAL = {name: called.replace("mlp.", "block_sparse_moe.") for name, called in _IN_LAYER.items() if "_exps" in name}
_MIXTRAL["ffn_gate_inp"] = "block_sparse_moe.gate"
_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
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
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GGUFStyle:
    names: Mapping[str, str] = field(default_factory=dict)  # within a layer, where they are not the usual ones
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the config, which no metadata gives
    permuted: bool = False  # queries and keys are kept so that rope turns neighbours
    patterned: bool = False  # which layers have a window is the family's own rule
    without_keys: str | None = None  # type of the layers that have no heads of keys, where some have none
    metadata: Mapping[str, str] = field(default_factory=dict)  # more fields of the config -> what gives them
    whole_names: Mapping[str, str] = field(default_factory=dict)  # within a layer, of tensors that are no module's
    more: Callable[[GGUFFile, Mapping[str, Any]], Mapping[str, Any]] | None = None  # fields, by those read so far


_LFM2_FIELDS = {
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
}
_RAISED = {"norm_offset": 0.0}  # converters have already added the one
STYLES = {
    "gemma": GGUFStyle(fields=_RAISED),
    "gemma2": GGUFStyle(_AROUND, _RAISED, patterned=True),
    "gemma3": GGUFStyle(_AROUND, _RAISED, patterned=True),
    "granite": GGUFStyle(permuted=True),
    "lfm2": GGUFStyle(_LFM2, {"block_auto_adjust_ff_dim": False}, without_keys="conv", metadata=_LFM2_FIELDS),
    "lfm2moe": GGUFStyle(
        _LFM2, without_keys="conv", metadata=_LFM2_FIELDS, whole_names={"exp_probs_b.bias": "feed_forward.expert_bias"}
    ),
    "llama": GGUFStyle(_MIXTRAL, permuted=True),
    "nemotron": GGUFStyle(fields=_RAISED),
    "olmo2": GGUFStyle(_AROUND),
    "phi3": GGUFStyle({"ffn_up": "mlp.gate_up_proj"}),
    "smollm3": GGUFStyle(permuted=True),
    "stablelm": GGUFStyle({"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}),
    "starcoder2": GGUFStyle({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}
PLAIN = GGUFStyle()


def style_of(arch: object) -> GGUFStyle:
    return STYLES.get(str(arch), PLAIN)


def hf_name(name: str, style: GGUFStyle = PLAIN) -> str:
    """The checkpoint name of a GGUF tensor; a name we do not know stays, so that the strict load can complain of it."""
    found = _LAYER_NAME.fullmatch(name)
    called = style.names.get(found[2], _IN_LAYER.get(found[2])) if found else None
    if found and (whole := style.whole_names.get(f"{found[2]}.{found[3]}")):
        return f"model.layers.{found[1]}.{whole}"
    if found and called:
        return f"model.layers.{found[1]}.{called}.{found[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name
