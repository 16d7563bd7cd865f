"""The mixtures with dense attention: how each model type differs, read from its config.json.

A family is a line in `MOE`: the reader of its attention, the reader of its experts, and their checkpoint names. `moe`
builds from that. Mixtures with other attention use `shared_beside_routed`, `sparse_layers` and `draft_layers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.kernels.expert_types import Routing
from quire.layers.attention import AttentionNames
from quire.layers.experts import ExpertNames, MoEShape
from quire.layers.rope import RopeConfig
from quire.models.families.dense.config import DenseConfig, LayerNames, NormStyle, read_common
from quire.models.families.dense.families import read_dense
from quire.models.families.dense.windows import all_windowed, early_windowed
from quire.models.families.granite_moe import EXPERT_NAMES, LATER_NAMES
from quire.models.fields import bound, check_layer_indices, check_layer_types, flag, number, whole
from quire.types import QuireError

Fields = Mapping[str, Any]


def sparse_layers(config: Fields, num_layers: int) -> frozenset[int]:
    """Returns the layers with experts: by `mlp_layer_types`; or all after `first_k_dense_replace`, every
    `decoder_sparse_step`-th, except `mlp_only_layers`.
    """
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        check_layer_types(kinds, ("dense", "sparse"), num_layers)
        return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
    first = config.get("first_k_dense_replace") or 0
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= num_layers:
        what = f"first_k_dense_replace={first!r} must lie between 0 and the {num_layers} layers."
        raise QuireError("bad_config", what, "Check config.json.")
    step = whole(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    check_layer_indices(dense, "mlp_only_layers", num_layers)
    return frozenset(index for index in range(first, num_layers) if (index + 1) % step == 0 and index not in dense)


def draft_layers(config: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns the name prefixes of draft layers (multi-token prediction), which follow the model's own in a
    checkpoint.
    """
    num_drafts = config.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{num_layers + index}." for index in range(num_drafts))


# ---------------------------------------------------------------------------------------------------------------------
# Families


def _like_dense(model_type: str) -> Callable[[Fields], DenseConfig]:
    """Returns a reader of everything except the experts by a dense family."""
    return lambda config: read_dense({**config, "model_type": model_type})


def _mixtral(config: Fields) -> DenseConfig:
    """Mistral's attention, with a window in every layer whatever `layer_types` has."""
    usual = {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    return all_windowed(config, read_dense({**usual, **config, "model_type": "mistral"}))


def _qwen2(config: Fields) -> DenseConfig:
    """Qwen2's attention with early windows; configs write a disabled window as 0."""
    if not config.get("use_sliding_window"):
        return read_dense({**config, "sliding_window": None, "model_type": "qwen2"})
    return early_windowed(config, read_dense({**config, "model_type": "qwen2"}))


def _qwen3(config: Fields) -> DenseConfig:
    """Qwen3's attention; an enabled window is in every layer."""
    dense = read_dense({"head_dim": None, **config, "model_type": "qwen3"})
    return all_windowed(config, dense) if flag(config, "use_sliding_window", False) else dense


def _olmoe(config: Fields) -> DenseConfig:
    return replace(read_common({"rms_norm_eps": 1e-5, **config}), qk_norm="wide", clip=bound(config, "clip_qkv"))


def _dots1(config: Fields) -> DenseConfig:
    window = config.get("sliding_window", 4096)
    fields = {**config, "sliding_window": window, "use_sliding_window": window is not None, "model_type": "qwen3"}
    return read_dense(fields)


def _glm4_moe(config: Fields) -> DenseConfig:
    """Only queries, keys and values have biases."""
    dense = read_common({"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **config})
    return replace(dense, out_bias=False, qk_norm="head" if flag(config, "use_qk_norm", False) else "none")


def _solar_open(config: Fields) -> DenseConfig:
    """Experts in every layer; only queries, keys and values may have biases."""
    fields = {"head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-5, **config}
    return replace(read_common({"intermediate_size": whole(config, "moe_intermediate_size"), **fields}), out_bias=False)


def _exaone_moe(config: Fields) -> DenseConfig:
    """EXAONE 4's attention, with Llama's places of norms."""
    return replace(read_dense({**config, "model_type": "exaone4"}), norms=LayerNames())


def _afmoe(config: Fields) -> DenseConfig:
    """EXAONE 4's windows, with norms around both blocks; attention has an output gate."""
    if flag(config, "attention_bias", False):
        what = "attention_bias=True of afmoe is not supported: its gate projections have no bias."
        raise QuireError("unsupported_model", what, "Use a model without them.")
    every = whole(config, "global_attn_every_n_layers", 4)
    dense = read_dense({**config, "sliding_window_pattern": every, "model_type": "exaone4"})
    return replace(
        dense,
        norms=LayerNames("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
        attention_names=AttentionNames(gate="gate_proj"),
        embedding_scale=math.sqrt(dense.width) if flag(config, "mup_enabled", False) else 1.0,
    )


def _flex_olmo(config: Fields) -> DenseConfig:
    """OLMo 2's attention and places of norms."""
    return read_dense({"rope_theta": 500000.0, "rms_norm_eps": 1e-6, **config, "model_type": "olmo2"})


def _normed_heads(config: Fields) -> DenseConfig:
    return replace(read_common(config), qk_norm="head")


def _minimax_m2(config: Fields) -> DenseConfig:
    fields = {"head_dim": 128, "rope_theta": 5e6, **config}
    if config.get("rotary_dim") is not None:  # the field of published files
        fields["partial_rotary_factor"] = whole(config, "rotary_dim") / whole(fields, "head_dim")
    return replace(read_common(fields), qk_norm="wide")


def _cohere2_layers(config: Fields) -> Fields:
    """Lists layer types and expert layers explicitly: the first layers may have no experts, and windows by another
    pattern.
    """
    num_layers, first = whole(config, "num_hidden_layers"), config.get("first_k_dense_replace") or 0
    fields = dict(config)
    if config.get("mlp_layer_types") is None:
        sparse = sparse_layers(config, num_layers)
        fields["mlp_layer_types"] = ["sparse" if layer in sparse else "dense" for layer in range(num_layers)]
    if config.get("layer_types") is None:
        early, every = (
            whole(config, "prefix_dense_sliding_window_pattern", 1),
            whole(config, "sliding_window_pattern", 4),
        )
        places = [(i + 1) % early for i in range(first)] + [(i + 1) % every for i in range(num_layers - first)]
        fields["layer_types"] = ["sliding_attention" if place else "full_attention" for place in places]
    return fields


def _cohere2_moe(config: Fields) -> DenseConfig:
    """Layers without experts have another width. They have rope also with full attention, unless the first layers have
    windows by a pattern.
    """
    inner = whole(config, "prefix_dense_intermediate_size", whole(config, "intermediate_size"))
    dense = read_dense({"head_dim": 128, **config, "intermediate_size": inner, "model_type": "cohere2"})
    if config.get("rms_norm_eps") is not None:
        dense = replace(dense, norm=NormStyle(eps=number(config, "rms_norm_eps", 1e-6)))
    if whole(config, "prefix_dense_sliding_window_pattern", 1) != 1:
        return dense
    rope, sparse = RopeConfig.from_hf(dict(config)), sparse_layers(config, dense.num_layers)
    return replace(dense, ropes=tuple(each if i in sparse else rope for i, each in enumerate(dense.ropes)))


def _aria(config: Fields) -> DenseConfig:
    check_unbiased(config)
    return read_common(config)


def _afmoe_layers(config: Fields) -> Fields:
    return {**config, "first_k_dense_replace": config.get("num_dense_layers")}


def _full_attention_layers(config: Fields) -> Fields:
    """Without `layer_types`, all of Mellum's layers have full attention, with the rope of that kind."""
    if config.get("layer_types") is not None:
        return config
    return {**config, "layer_types": ["full_attention"] * whole(config, "num_hidden_layers")}


def _with_common_names(config: Fields) -> Fields:
    """Renames ERNIE's fields of expert layers, expert count and top-k."""
    num_layers, every = whole(config, "num_hidden_layers"), whole(config, "moe_layer_interval", 1)
    first, last = config.get("moe_layer_start_index"), config.get("moe_layer_end_index")
    for key, value in (("moe_layer_start_index", first), ("moe_layer_end_index", last)):
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < num_layers:
            what = f"{key}={value!r} must be a layer below {num_layers}."
            raise QuireError("bad_config", what, "Check config.json.")
    assert isinstance(first, int) and isinstance(last, int)
    sparse = range(first, (num_layers if last == -1 else last + 1))
    kinds = ["sparse" if layer in sparse and (layer + 1) % every == 0 else "dense" for layer in range(num_layers)]
    counts = {"num_experts": config.get("moe_num_experts"), "num_experts_per_tok": config.get("moe_k")}
    return {**config, "mlp_layer_types": kinds, **{key: value for key, value in counts.items() if value is not None}}


def _ernie_shape(config: Fields) -> MoEShape:
    """Softmax scores, and a bias that balances the choice."""
    inner = whole(config, "moe_intermediate_size")
    shared = inner * (config.get("moe_num_shared_experts") or 0)
    routing = replace(_routing(config), exact=True)
    return MoEShape(whole(config, "hidden_size"), inner, routing, shared_width=shared, choice_bias=True)


def _plain_shape(config: Fields) -> MoEShape:
    return MoEShape(whole(config, "hidden_size"), whole(config, "intermediate_size"), _routing(config))


def _granite_shape(config: Fields) -> MoEShape:
    """Some have a shared block; a width of 0 means none."""
    shape, key = _plain_shape(config), "shared_intermediate_size"
    has_shared = config["model_type"] != "granitemoe" and config.get(key) not in (None, 0)
    return replace(shape, shared_width=whole(config, key)) if has_shared else shape


def _cohere2_shape(config: Fields) -> MoEShape:
    """The shared experts' output is added to that of the routed ones, or averaged with it."""
    score = _one_of(config, "expert_selection_fn", ("softmax", "sigmoid"))
    how = _one_of(config, "shared_expert_combination_strategy", ("average", "sum"))
    shape, key = _plain_shape(config), "num_shared_experts"
    num_shared = whole(config, key) if config.get(key) not in (None, 0) else 0
    share = 0.5 if num_shared and how == "average" else 1.0
    normalise = score == "softmax" or flag(config, "norm_topk_prob", True)
    routing = replace(shape.routing, score=score, normalise=normalise, scale=share)
    return replace(shape, routing=routing, shared_width=shape.inner_width * num_shared, shared_scale=share)


def _one_of(config: Fields, key: str, known: tuple[str, ...]) -> Any:
    """Returns a field's value, which must be known; the first known value is the default."""
    value = known[0] if config.get(key) is None else config[key]
    if value not in known:
        what = f"{key}={value!r} of {config['model_type']} is not supported."
        raise QuireError("unsupported_model", what, f"Supported are {' and '.join(known)}.")
    return value


def _aria_shape(config: Fields) -> MoEShape:
    routing = Routing(whole(config, "moe_num_experts", 8), whole(config, "moe_topk", 2))
    inner = whole(config, "intermediate_size")
    shared = inner * whole(config, "moe_num_shared_experts", 2)
    return MoEShape(whole(config, "hidden_size"), inner, routing, shared_width=shared)


def _minimax_shape(config: Fields) -> MoEShape:
    routing = replace(_routing(config), score="sigmoid")
    return MoEShape(whole(config, "hidden_size"), whole(config, "intermediate_size"), routing, choice_bias=True)


def _olmoe_shape(config: Fields) -> MoEShape:
    shape = _plain_shape(config)
    return replace(shape, routing=replace(shape.routing, normalise=flag(config, "norm_topk_prob", False)))


def _qwen_shape(config: Fields) -> MoEShape:
    routing = replace(_routing(config), normalise=flag(config, "norm_topk_prob", False))
    return MoEShape(whole(config, "hidden_size"), whole(config, "moe_intermediate_size"), routing)


def _qwen2_shape(config: Fields) -> MoEShape:
    shared = whole(config, "shared_expert_intermediate_size")
    return replace(_qwen_shape(config), shared_width=shared, shared_gated=True)


def shared_beside_routed(config: Fields) -> MoEShape:
    """DeepSeek V3's experts, which other families use, too: sigmoid scores, a bias that balances the choice, groups."""
    method = config.get("topk_method") or "noaux_tc"
    if method != "noaux_tc":
        what = f"topk_method={method!r} of {config['model_type']} is not supported."
        raise QuireError("unsupported_model", what, "Supported is noaux_tc.")
    groups = whole(config, "n_group", 1)
    routing = replace(
        _routing(config),
        score="sigmoid",
        normalise=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=whole(config, "topk_group", 1),
        group_members=2 if groups > 1 else 1,
        exact=True,
    )
    inner = whole(config, "moe_intermediate_size")
    shared = inner * (config.get("n_shared_experts") or 0)
    return MoEShape(whole(config, "hidden_size"), inner, routing, shared_width=shared, choice_bias=True)


def _exaone_shape(config: Fields) -> MoEShape:
    shared = config.get("num_shared_experts", 1)
    return shared_beside_routed({"routed_scaling_factor": 2.5, **config, "n_shared_experts": shared})


def _afmoe_shape(config: Fields) -> MoEShape:
    _one_of(config, "score_func", ("sigmoid",))
    scale = number(config, "route_scale", 1.0)
    words = {"n_shared_experts": config.get("num_shared_experts", 2), "routed_scaling_factor": scale}
    return shared_beside_routed({**config, **words, "norm_topk_prob": True})


def _hunyuan_shape(config: Fields) -> MoEShape:
    """One shared expert, as wide as the routed ones. Published files give the top-k of every layer."""
    given = config.get("moe_topk", config.get("num_experts_per_tok"))
    counts = set(given) if isinstance(given, (list, tuple)) else {given}
    if len(counts) != 1:
        what = f"moe_topk={given!r} of hunyuan_v1_moe is not supported: all layers must have the same number."
        raise QuireError("unsupported_model", what, "Check config.json.")
    routing = Routing(whole(config, "num_experts", 1), whole({"moe_topk": counts.pop()}, "moe_topk", 1), exact=True)
    inner = whole(config, "intermediate_size")
    return MoEShape(whole(config, "hidden_size"), inner, routing, shared_width=inner)


def _hy_shape(config: Fields) -> MoEShape:
    check_unbiased(config)
    scale = number(config, "router_scaling_factor", 2.826)
    words = {"n_shared_experts": config.get("num_shared_experts", 1), "routed_scaling_factor": scale}
    return shared_beside_routed({**config, **words, "norm_topk_prob": True})


def check_unbiased(config: Fields) -> None:
    """Refuses biases in feed-forward blocks."""
    if flag(config, "mlp_bias", False):
        what = f"mlp_bias=True of {config['model_type']} is not supported: shared experts have no biases here."
        raise QuireError("unsupported_model", what, "Use a model without them.")


def _routing(config: Fields) -> Routing:
    """Returns the routing, by any of the fields for the number of experts."""
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    return Routing(whole(config, key), whole(config, "num_experts_per_tok"))


@dataclass(frozen=True, slots=True)
class MoEFamily:
    """How a model type's config.json becomes a `MoEConfig`."""

    dense: Callable[[Fields], DenseConfig]
    shape: Callable[[Fields], MoEShape]
    names: ExpertNames
    defaults: Fields = field(default_factory=dict)  # values of fields that config.json may omit
    rename: Callable[[Fields], Fields] = lambda config: config  # renames fields to their common names
    granite_layout: bool = False  # see `granite_moe`


_MIXTRAL = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2", choice_bias="e_score_correction_bias")
_QWEN = ExpertNames("mlp")
_DEEPSEEK = ExpertNames("mlp", shared="shared_experts")
_ERNIE = {
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}
_GRANITE = {"num_local_experts": 8, "num_experts_per_tok": 2}
_GRANITE_SWA = {**_GRANITE, "num_key_value_heads": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_AFMOE = {"head_dim": 128, "sliding_window": 1024, "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6}
_COHERE2 = {"num_experts": 8, "num_experts_per_tok": 2}
_FLEX_OLMO = {"num_experts": 7, "num_experts_per_tok": 5}
_HY_V3 = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11158840.0,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
_MELLUM = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "sliding_window": 1024,
    "norm_topk_prob": True,
    "rope_parameters": {"full_attention": {"rope_theta": 500000.0}, "sliding_attention": {"rope_theta": 10000.0}},
}
_GLM = {"n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
_ARIA = ExpertNames(
    "mlp", router="router", two=("experts.fc1.weight", "experts.fc2.weight"), in_columns=True, shared="shared_experts"
)
MOE = {
    "afmoe": MoEFamily(
        _afmoe,
        _afmoe_shape,
        ExpertNames("mlp", router="router.gate", choice_bias="expert_bias", shared="shared_experts"),
        _AFMOE,
        _afmoe_layers,
    ),
    "aria_text": MoEFamily(_aria, _aria_shape, _ARIA),
    "cohere2_moe": MoEFamily(_cohere2_moe, _cohere2_shape, _DEEPSEEK, _COHERE2, _cohere2_layers),
    "dots1": MoEFamily(_dots1, shared_beside_routed, _DEEPSEEK, {"norm_topk_prob": False}),
    "ernie4_5_moe": MoEFamily(
        _like_dense("ernie4_5"),
        _ernie_shape,
        replace(_DEEPSEEK, choice_bias="moe_statics.e_score_correction_bias", choice_bias_rows=1),
        _ERNIE,
        _with_common_names,
    ),
    "exaone_moe": MoEFamily(_exaone_moe, _exaone_shape, replace(_DEEPSEEK, choice_bias="e_score_correction_bias")),
    "flex_olmo": MoEFamily(_flex_olmo, _olmoe_shape, _QWEN, _FLEX_OLMO),
    "glm4_moe": MoEFamily(_glm4_moe, shared_beside_routed, _DEEPSEEK, _GLM),
    "granitemoe": MoEFamily(_like_dense("granite"), _granite_shape, EXPERT_NAMES, _GRANITE, granite_layout=True),
    "granitemoe_swa": MoEFamily(
        _like_dense("granite_swa"), _granite_shape, LATER_NAMES, _GRANITE_SWA, granite_layout=True
    ),
    "granitemoeshared": MoEFamily(_like_dense("granite"), _granite_shape, EXPERT_NAMES, _GRANITE, granite_layout=True),
    "hunyuan_v1_moe": MoEFamily(
        _like_dense("hunyuan_v1_dense"),
        _hunyuan_shape,
        ExpertNames("mlp", router="gate.wg", shared="shared_mlp"),
        {"rms_norm_eps": 1e-5},
    ),
    "hy_v3": MoEFamily(
        _normed_heads,
        _hy_shape,
        ExpertNames("mlp", router="router.gate", choice_bias="expert_bias", shared="shared_mlp"),
        _HY_V3,
    ),
    "mellum": MoEFamily(_normed_heads, _qwen_shape, _QWEN, _MELLUM, _full_attention_layers),
    "minimax_m2": MoEFamily(_minimax_m2, _minimax_shape, _MIXTRAL),
    "mixtral": MoEFamily(_mixtral, _plain_shape, _MIXTRAL),
    "olmoe": MoEFamily(_olmoe, _olmoe_shape, _QWEN),
    "qwen2_moe": MoEFamily(_qwen2, _qwen2_shape, _QWEN),
    "qwen3_moe": MoEFamily(_qwen3, _qwen_shape, _QWEN),
    "solar_open": MoEFamily(_solar_open, shared_beside_routed, _DEEPSEEK, {"n_shared_experts": 1}),
}
