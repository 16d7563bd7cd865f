"""The dense families: how each model type differs from Llama, read from its config.json.

A family is a line in `DENSE` and, where it differs by more than defaults, a function that changes the common config.
`DenseModel` itself knows no model types. Fields that config.json omits have the values that transformers gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.layers.attention import AttentionNames, QueryScaling
from quire.layers.mlp import MLPNames
from quire.layers.norm import HeadNorms
from quire.layers.rope import RopeConfig
from quire.models.families.dense.config import (
    ONE_NORM,
    DenseConfig,
    LayerNames,
    NormStyle,
    layer_norm,
    read_common,
    window_size,
)
from quire.models.families.dense.gpt import gpt_neox, persimmon, phi, with_common_names
from quire.models.families.dense.windows import (
    KINDS,
    NO_ROPE,
    all_windowed,
    rope_where_windowed,
    upper_windowed,
    windowed_by_kind,
    windowed_except_every,
    windowed_except_first_of_four,
    windowed_where_no_rope,
)
from quire.models.fields import above_zero, bound, check_causal, flag, number, whole, with_defaults
from quire.types import QuireError

Fields = Mapping[str, Any]
FUSED_QKV = AttentionNames(qkv=("qkv_proj",))
FUSED_GATE_UP = MLPNames(up=("gate_up_proj",))
SANDWICH = LayerNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
AFTER_ONLY = LayerNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class DenseFamily:
    """How a model type's config.json becomes a `DenseConfig`."""

    change: Callable[[Fields, DenseConfig], DenseConfig] = lambda config, dense: dense
    defaults: Fields = field(default_factory=dict)  # values of fields that config.json may omit
    rename: Callable[[Fields], Fields] = lambda config: config  # renames fields to their common names


def read_dense(config: Fields) -> DenseConfig:
    """Reads the fields of a config.json whose `model_type` is in `DENSE`."""
    family = DENSE[config["model_type"]]
    config = family.rename(with_defaults(config, family.defaults))
    return family.change(config, read_common(config))


# ---------------------------------------------------------------------------------------------------------------------
# Layers of different kinds


def _ministral3(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Scales queries beyond the first training length; where no sequence gets that long, the model is a Mistral."""
    dense = all_windowed(config, dense)
    by = number(config.get("rope_parameters") or {}, "llama_4_scaling_beta", 0.0)
    first_len = dense.ropes[0].original_len
    if not by or (config.get("served_len") or dense.max_positions) <= first_len:
        return dense
    return replace(dense, query_scaling=QueryScaling(by, first_len))


def _cwm(config: Fields, dense: DenseConfig) -> DenseConfig:
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        dense = replace(dense, ropes=(RopeConfig.from_hf({**config, "rope_parameters": _CWM_ROPE}),) * dense.num_layers)
    return windowed_except_first_of_four(config, dense)


def _qwen2(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(upper_windowed(config, dense), qkv_bias=True, out_bias=False)


def _mimo(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(_qwen2(config, dense), mtp_layers="model.mtp_layers")


def _qwen3(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(upper_windowed(config, dense), qk_norm="head")


def _smollm3(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Every fourth layer has no rope."""
    every = whole(config, "no_rope_layer_interval", 4)
    has_rope = config.get("no_rope_layers") or [(index + 1) % every != 0 for index in range(dense.num_layers)]
    if len(has_rope) < dense.num_layers:
        what = f"no_rope_layers has {len(has_rope)} entries, but num_hidden_layers={dense.num_layers}."
        raise QuireError("bad_config", what, "Check config.json.")
    ropes = zip(dense.ropes, has_rope[: dense.num_layers], strict=True)
    return windowed_where_no_rope(
        config, replace(dense, ropes=tuple(rope if rotates else NO_ROPE for rope, rotates in ropes))
    )


# ---------------------------------------------------------------------------------------------------------------------
# One function per family


def _gemma(config: Fields, dense: DenseConfig) -> DenseConfig:
    check_causal(config)
    return replace(
        dense,
        norm=replace(dense.norm, offset=number(config, "norm_offset", 1.0)),
        embedding_scale=math.sqrt(dense.width),
        activation="gelu_pytorch_tanh" if dense.activation == "gelu" else dense.activation,
    )


def _gemma2(config: Fields, dense: DenseConfig) -> DenseConfig:
    return _gemma_norms(config, windowed_except_every(config, dense, every=2))


def _vaultgemma(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Gemma 2 without norms after its blocks."""
    return replace(_gemma2(config, dense), norms=LayerNames(before_mlp="pre_feedforward_layernorm"))


def _gemma_norms(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(
        _gemma(config, dense),
        norms=SANDWICH,
        attention_scale=above_zero(config, "query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=bound(config, "attn_logit_softcapping"),
        logit_softcap=bound(config, "final_logit_softcapping"),
    )


def _gemma3(config: Fields, dense: DenseConfig) -> DenseConfig:
    dense = windowed_except_every(config, dense, every=config.get("sliding_window_pattern") or 6)
    if not set(config.get("rope_parameters") or {}) & set(KINDS):
        local = RopeConfig(theta=number(config, "rope_local_base_freq", 10000.0))
        pairs = zip(dense.ropes, dense.windows, strict=True)
        dense = replace(dense, ropes=tuple(rope if window is None else local for rope, window in pairs))
    # `attn_logit_softcapping` is a field of Gemma 2 that Gemma 3 has without using it.
    return replace(_gemma_norms(config, dense), qk_norm="head", attention_softcap=None)


def _phi3(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(all_windowed(config, dense), attention_names=FUSED_QKV, mlp_names=FUSED_GATE_UP)


def _olmo(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(dense, norm=NormStyle("layer", 1e-5, weight=False), clip=bound(config, "clip_qkv"))


def _olmo2(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(dense, norms=AFTER_ONLY, qk_norm="wide")


def _olmo3(config: Fields, dense: DenseConfig) -> DenseConfig:
    dense = windowed_except_every(config, dense, every=4)
    if not set(config.get("rope_parameters") or {}) & set(KINDS):
        local = RopeConfig(theta=dense.ropes[0].theta)  # only full-attention layers have scaled rope
        pairs = zip(dense.ropes, dense.windows, strict=True)
        dense = replace(dense, ropes=tuple(rope if window is None else local for rope, window in pairs))
    return _olmo2(config, dense)


def _granite(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(
        dense,
        attention_scale=number(config, "attention_multiplier", 1.0),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / above_zero(config, "logits_scaling", 1.0),
    )


def _granite_swa(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Sinks and windows; each layer has its own rope frequency, or none."""
    dense = replace(_granite(config, windowed_except_first_of_four(config, dense)), sinks=True)
    speeds, key = config.get("layer_rope_theta"), "layer_rope_theta"
    if speeds is None:
        return dense
    if not isinstance(speeds, (list, tuple)) or len(speeds) != dense.num_layers:
        what = f"{key}={speeds!r} must have a number for each of the {dense.num_layers} layers."
        raise QuireError("bad_config", what, "Check config.json.")
    thetas = [above_zero({key: theta}, key, 0.0) if theta else None for theta in speeds]
    pairs = zip(dense.ropes, thetas, strict=True)
    return replace(
        dense, ropes=tuple(NO_ROPE if theta is None else replace(rope, theta=theta) for rope, theta in pairs)
    )


def _hyperclovax(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Granite with norms after its blocks. `logits_scaling` multiplies logits, where Granite divides by it."""
    behind = LayerNames(after_attention="post_norm1", after_mlp="post_norm2")
    return replace(
        _granite(config, dense),
        attention_scale=number(config, "attention_multiplier", dense.head_dim**-0.5),
        logit_scale=above_zero(config, "logits_scaling", 1.0),
        norms=behind if flag(config, "use_post_norm", True) else dense.norms,
    )


def _cohere(config: Fields, dense: DenseConfig) -> DenseConfig:
    dense = layer_norm(config, dense)
    return replace(
        dense,
        norm=replace(dense.norm, bias=False),
        norms=ONE_NORM,
        parallel=True,
        rope_interleaved=True,
        head_norms=HeadNorms() if flag(config, "use_qk_norm", False) else None,
        logit_scale=number(config, "logit_scale", 0.0625),
    )


def _cohere2(config: Fields, dense: DenseConfig) -> DenseConfig:
    return rope_where_windowed(
        _cohere(config, windowed_except_every(config, dense, every=config.get("sliding_window_pattern") or 4))
    )


def _starcoder2(config: Fields, dense: DenseConfig) -> DenseConfig:
    has_bias = flag(config, "use_bias", True)
    return replace(
        all_windowed(config, layer_norm(config, dense, "norm_epsilon")),
        gated=False,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        mlp_names=MLPNames(up=("c_fc",), down="c_proj"),
    )


def _stablelm(config: Fields, dense: DenseConfig) -> DenseConfig:
    parallel = flag(config, "use_parallel_residual", False)
    heads = HeadNorms("q_layernorm", "k_layernorm", "apart")
    return replace(
        layer_norm(config, dense),
        qkv_bias=flag(config, "use_qkv_bias", False),
        out_bias=False,
        parallel=parallel,
        norms=ONE_NORM if parallel else dense.norms,
        head_norms=heads if flag(config, "qk_layernorm", False) else None,
    )


def _nemotron(config: Fields, dense: DenseConfig) -> DenseConfig:
    dense = layer_norm(config, dense, "norm_eps")
    norm = replace(dense.norm, offset=number(config, "norm_offset", 1.0))
    return replace(dense, norm=norm, gated=False, mlp_names=MLPNames(up=("up_proj",)))


def _arcee(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(dense, gated=False, mlp_names=MLPNames(up=("up_proj",)))


def _jais2(config: Fields, dense: DenseConfig) -> DenseConfig:
    return _arcee(config, layer_norm(config, dense))


def _glm(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(dense, rope_interleaved=True, out_bias=False, mlp_names=FUSED_GATE_UP)


def _glm4(config: Fields, dense: DenseConfig) -> DenseConfig:
    norms = LayerNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return replace(_glm(config, dense), norms=norms)


def _hunyuan(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Heads are normed after rope, which removes any factor of rope's. A "dynamic" rope with an alpha has a fixed,
    larger theta at any length.
    """
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope = replace(dense.ropes[0], attention_factor=1.0)
    if rope.kind == "dynamic" and given.get("alpha"):
        slower = above_zero(given, "alpha", 1.0) ** (dense.head_dim / (dense.head_dim - 2))
        rope = replace(rope, theta=rope.theta * slower)
    names = AttentionNames(head_norms=("query_layernorm", "key_layernorm"))
    return replace(dense, ropes=(rope,) * dense.num_layers, qk_norm="after_rope", mlp_bias=False, attention_names=names)


def _ernie(config: Fields, dense: DenseConfig) -> DenseConfig:
    has_bias = flag(config, "use_bias", False)
    return replace(dense, rope_interleaved=True, qkv_bias=has_bias, out_bias=has_bias, mlp_bias=has_bias)


def _helium(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(dense, rope_interleaved=True, out_bias=False)


def _seed_oss(config: Fields, dense: DenseConfig) -> DenseConfig:
    return replace(dense, out_bias=flag(config, "attention_out_bias", False))


def _exaone4(config: Fields, dense: DenseConfig) -> DenseConfig:
    window = window_size(config)
    if window is not None:
        every = config.get("sliding_window_pattern") or 4
        every = len(every) if isinstance(every, str) else every  # LLLG is 4
        dense = rope_where_windowed(windowed_except_every(config, dense, every))
    return replace(dense, norms=AFTER_ONLY, qk_norm="head", qkv_bias=False, out_bias=False)


# ---------------------------------------------------------------------------------------------------------------------

_MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GEMMA = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_GEMMA2 = {**_GEMMA, "sliding_window": 4096}
_GEMMA3 = {  # within a multimodal model, its config only has the fields that differ from the 4B model
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
}
_CWM_ROPE = {"rope_theta": 1000000.0, "rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}
_GLM = {
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "num_key_value_heads": 2,
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}

DENSE: dict[str, DenseFamily] = {
    "arcee": DenseFamily(_arcee, {"hidden_act": "relu2", "rms_norm_eps": 1e-5}),
    "cohere": DenseFamily(_cohere, {"rope_theta": 500000.0, "tie_word_embeddings": True}),
    "cohere2": DenseFamily(_cohere2, {"sliding_window": 4096, "tie_word_embeddings": True}),
    "cwm": DenseFamily(_cwm, {"sliding_window": 8192, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0}),
    "ernie4_5": DenseFamily(
        _ernie, {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ),
    "exaone4": DenseFamily(_exaone4, {"sliding_window": 4096, "rms_norm_eps": 1e-5}),
    "gemma": DenseFamily(_gemma, {**_GEMMA, "hidden_activation": None, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": DenseFamily(_gemma2, {**_GEMMA2, **_CAPS}),
    "gemma3_text": DenseFamily(_gemma3, {**_GEMMA2, **_GEMMA3}),
    "glm": DenseFamily(_glm, _GLM),
    "glm4": DenseFamily(_glm4, _GLM),
    "gpt_neox": DenseFamily(
        gpt_neox, {"hidden_act": "gelu", "attention_bias": True, "partial_rotary_factor": 0.25}, with_common_names
    ),
    "granite": DenseFamily(_granite),
    "granite_swa": DenseFamily(
        _granite_swa,
        {"sliding_window": 128, "rms_norm_eps": 1e-5, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "helium": DenseFamily(_helium, {"rope_theta": 100000.0, "rms_norm_eps": 1e-8, "head_dim": 128}),
    "hunyuan_v1_dense": DenseFamily(_hunyuan, {"rms_norm_eps": 1e-5}),
    "hyperclovax": DenseFamily(_hyperclovax),
    "jais2": DenseFamily(_jais2, {"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True}),
    "llama": DenseFamily(),
    "ministral": DenseFamily(windowed_by_kind, {"sliding_window": 4096}),
    "ministral3": DenseFamily(_ministral3, {"rms_norm_eps": 1e-5, "head_dim": 128, "rope_parameters": _MINISTRAL3}),
    "mistral": DenseFamily(windowed_by_kind, {"sliding_window": 4096}),
    "nemotron": DenseFamily(_nemotron, {"hidden_act": "relu2", "partial_rotary_factor": 0.5}),
    "olmo": DenseFamily(_olmo),
    "olmo2": DenseFamily(_olmo2, {"rms_norm_eps": 1e-5}),
    "olmo3": DenseFamily(_olmo3, {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0}),
    "persimmon": DenseFamily(persimmon, {"hidden_act": "relu2", "partial_rotary_factor": 0.5}, with_common_names),
    "phi": DenseFamily(phi, {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5}),
    "phi3": DenseFamily(
        _phi3,
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    ),
    "mimo": DenseFamily(_mimo, {"sliding_window": None}),
    "qwen2": DenseFamily(_qwen2, {"sliding_window": 4096}),
    "qwen3": DenseFamily(_qwen3, {"sliding_window": 4096, "head_dim": 128}),
    "seed_oss": DenseFamily(_seed_oss, {"attention_bias": True, "head_dim": 128}),
    "smollm3": DenseFamily(_smollm3, {"rope_theta": 2000000.0, "tie_word_embeddings": True}),
    "stablelm": DenseFamily(_stablelm, {"partial_rotary_factor": 0.25}),
    "starcoder2": DenseFamily(_starcoder2, {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
    "vaultgemma": DenseFamily(_vaultgemma, {**_GEMMA2, **_CAPS}),
}
