"""Tensor names and config fields of GGUF files of recurrent hybrids: Granite 4, Falcon-H1, Nemotron-H, Mamba2,
Qwen3-Next and Qwen3.5. `tensor_names` includes these styles in its table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.files.gguf import GGUFFile
from quire.models.families import bamba, falcon_h1, mamba2, nemotron_h
from quire.models.families.mamba2 import MambaFields
from quire.models.gguf.metadata import get, get_flag, get_layers, key_of, need, need_layers
from quire.models.gguf.style import GGUFStyle

Fields = Mapping[str, Any]
# ---------------------------------------------------------------------------------------------------------------------
# Names


def _mamba_names(mixer: str) -> dict[str, str]:
    return {"ssm_in": f"{mixer}.in_proj", "ssm_out": f"{mixer}.out_proj", "ssm_norm": f"{mixer}.norm"}


def _recurrent_names(mixer: str) -> dict[str, str]:
    """Names of tensors that are no module's weight or bias, or are stored in another form."""
    return {
        "ssm_a": f"{mixer}.A",
        "ssm_d": f"{mixer}.D",
        "ssm_dt.bias": f"{mixer}.dt_bias",
        "ssm_conv1d.weight": f"{mixer}.conv1d.taps.weight",
        "ssm_conv1d.bias": f"{mixer}.conv1d.bias",
    }


_MAMBA_SHAPES = {"ssm_a": (-1,), "ssm_d": (-1,), "ssm_norm": (-1,)}
GRANITE_BLOCKS = {
    **{
        f"ffn_{matrix}{end}": f"shared_mlp.{called}"
        for end in ("", "_shexp")
        for matrix, called in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "output_linear"))
    },
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.up_proj",
    "ffn_gate_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
_GRANITE = {**_mamba_names("mamba"), **GRANITE_BLOCKS}
_FALCON = {
    **_mamba_names("mamba"),
    **{f"ffn_{matrix}": f"feed_forward.{matrix}_proj" for matrix in ("gate", "up", "down")},
    "ffn_norm": "pre_ff_layernorm",
}
_MIXER = {  # Mamba2 and Nemotron-H have one block per layer, named mixer
    **_mamba_names("mixer"),
    **{f"attn_{matrix}": f"mixer.{matrix}_proj" for matrix in ("q", "k", "v")},
    "attn_norm": "norm",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_exps": "mixer.experts.up_proj",
    "ffn_down_exps": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
_QWEN = {
    **{f"ffn_{matrix}_shexp": f"mlp.shared_expert.{matrix}_proj" for matrix in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",  # early files of Qwen3-Next
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}

# ---------------------------------------------------------------------------------------------------------------------
# Configs


def _has(file: GGUFFile, tensor: str) -> bool:
    """Returns whether some layer has a tensor of this name."""
    return any(name.endswith(f".{tensor}") for name in file.tensors)


def _mamba(file: GGUFFile, names: MambaFields) -> dict[str, Any]:
    """Returns the sizes of Mamba2 layers under the family's field names."""
    heads, values = need(file, "ssm.time_step_rank"), need(file, "ssm.inner_size")
    fields: dict[str, Any] = {
        names.num_heads: heads,
        names.head_dim: values // max(heads, 1),
        names.num_groups: need(file, "ssm.group_count"),
        names.state_size: need(file, "ssm.state_size"),
        names.conv_len: need(file, "ssm.conv_kernel"),
        names.conv_bias: _has(file, "ssm_conv1d.bias"),
        names.bias: _has(file, "ssm_in.bias"),
    }
    if names.expand is not None:
        fields[names.expand] = values / max(need(file, "embedding_length"), 1)
    if names.values is not None:
        fields[names.values] = values
    return fields


def _granite(file: GGUFFile, fields: Fields) -> Fields:
    """Converted Bamba models have this architecture, too: with rope, and without the multipliers."""
    return {
        **_mamba(file, bamba.FIELDS),
        "num_local_experts": fields.get("num_local_experts", 0),
        "shared_intermediate_size": get(file, "expert_shared_feed_forward_length", 0) or fields["intermediate_size"],
        "position_embedding_type": "rope" if get_flag(file, "rope.scaling.finetuned", True) else "nope",
        "attention_multiplier": fields.get("attention_multiplier") or fields["head_dim"] ** -0.5,
    }


def _falcon(file: GGUFFile, fields: Fields) -> Fields:
    return {**_mamba(file, falcon_h1.FIELDS), "mamba_rms_norm": _has(file, "ssm_norm.weight")}


def _mamba2(file: GGUFFile, fields: Fields) -> Fields:
    return {**_mamba(file, mamba2.FIELDS), "layer_norm_epsilon": fields["rms_norm_eps"]}


def _nemotron(file: GGUFFile, fields: Fields) -> Fields:
    """A layer's type follows from its sizes: key-value heads, a feed-forward width, or neither, which means
    recurrent.
    """
    heads, inner = need_layers(file, "attention.head_count_kv"), need_layers(file, "feed_forward_length")
    block = "moe" if "num_experts" in fields else "mlp"
    kinds = [block if width else "attention" if keys else "mamba" for keys, width in zip(heads, inner, strict=True)]
    eps = get(file, "attention.layer_norm_epsilon", 1e-5)
    return {
        **_mamba(file, nemotron_h.FIELDS),
        "layers_block_type": kinds,
        "layer_norm_epsilon": get(file, "attention.layer_norm_rms_epsilon", eps),
        "intermediate_size": max(inner, default=0) or None,
        "n_routed_experts": fields.get("num_experts"),
        "norm_topk_prob": get_flag(file, "expert_weights_norm", True),
    }


_NEMOTRON_FIELDS = {
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_latent_size": "moe_latent_size",
}


def _qwen(file: GGUFFile, fields: Fields) -> Fields:
    heads, values = need(file, "ssm.time_step_rank"), need(file, "ssm.inner_size")
    recurrent = get_layers(file, "attention.recurrent_layers")
    kinds = ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent or ()]
    has_width = key_of(file, "feed_forward_length") in file.metadata  # absent where all layers have experts
    return {
        "linear_num_value_heads": heads,
        "linear_value_head_dim": values // max(heads, 1),
        "linear_num_key_heads": need(file, "ssm.group_count"),
        "linear_key_head_dim": need(file, "ssm.state_size"),
        "linear_conv_kernel_dim": need(file, "ssm.conv_kernel"),
        "full_attention_interval": get(file, "full_attention_interval", 4),
        "layer_types": kinds or None,
        "intermediate_size": need(file, "feed_forward_length") if has_width else fields.get("moe_intermediate_size"),
        "delta_nets_split": not _has(file, "ssm_in.weight"),
    }


def _qwen_style(*, tiled: bool) -> GGUFStyle:
    """`tiled`: value heads of the delta nets are ordered by their index in a group, then by group."""
    return GGUFStyle(
        _QWEN,
        {"norm_offset": 0.0, "value_heads_tiled": tiled},  # converters have already added the 1
        has_own_windows=True,
        read_apart=frozenset({"feed_forward_length"}),
        metadata={"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        whole_names=_recurrent_names("linear_attn"),
        shapes={"ffn_gate_inp_shexp": (1, -1)},
        extra_fields=_qwen,
    )


def _backbone_style(extra_fields: Callable[[GGUFFile, Fields], Fields]) -> GGUFStyle:
    return GGUFStyle(
        _MIXER,
        has_own_windows=True,
        keyless_type="mamba",
        read_apart=frozenset({"feed_forward_length"}),
        metadata=_NEMOTRON_FIELDS,
        whole_names={**_recurrent_names("mixer"), "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        layers="backbone.layers",
        top_names=_BACKBONE,
        shapes=_MAMBA_SHAPES,
        extra_fields=extra_fields,
    )


HYBRID_STYLES = {
    "falcon-h1": GGUFStyle(
        _FALCON,
        {"mamba_norm_before_gate": False},
        has_own_windows=True,
        whole_names={**_recurrent_names("mamba"), "ffn_norm": "pre_ff_layernorm.weight"},
        top_names={"output_norm": "model.final_layernorm"},
        shapes=_MAMBA_SHAPES,
        extra_fields=_falcon,
    ),
    "granitehybrid": GGUFStyle(
        _GRANITE,
        permuted=True,
        keyless_type="linear_attention",
        whole_names=_recurrent_names("mamba"),
        shapes=_MAMBA_SHAPES,
        extra_fields=_granite,
    ),
    "mamba2": _backbone_style(_mamba2),
    "nemotron_h": _backbone_style(_nemotron),
    "nemotron_h_moe": _backbone_style(_nemotron),
    "qwen35": _qwen_style(tiled=True),
    "qwen35moe": _qwen_style(tiled=True),
    "qwen3next": _qwen_style(tiled=False),
}
