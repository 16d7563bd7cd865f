"""Kimi Linear: three Kimi Delta Attention layers, then one latent attention, each with a feed-forward block, which has
experts in all but the first layers. There is no rope: the rope elements of queries and keys are used unrotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quire.kernels.recurrent_types import RecurrentShape
from quire.layers.build import Build
from quire.layers.experts import ExpertNames, MoEShape
from quire.layers.latent import LatentAttention, LatentShape
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, moe_activations
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.channel_delta import ChannelDeltaNet, channel_activations
from quire.layers.rope import Rope, RopeConfig
from quire.layers.weights import add_other_names
from quire.models.families.deepseek import read_latent
from quire.models.families.hybrid import (
    BlockKind,
    HybridModel,
    HybridNames,
    HybridShape,
    block_activations,
    mixers_with_mlps,
)
from quire.models.families.moe_families import draft_layers, shared_beside_routed, sparse_layers
from quire.models.fields import check_layer_indices, check_silu, number, whole
from quire.types import QuireError

LAYER_TYPES: dict[str, BlockKind] = {"linear_attention": "recurrent", "full_attention": "attention"}
COMMON_NAMES = {  # field in published files -> field in DeepSeek's
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
LINEAR_NAMES = {  # field of `linear_attn_config` -> field in transformers
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
DEFAULTS: dict[str, Any] = {  # values of fields that config.json may omit
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True, slots=True)
class KimiLinearConfig:
    """Shape and options of a Kimi Linear model."""

    shape: HybridShape
    inner_width: int  # of the feed-forward blocks without experts
    sparse_layers: frozenset[int]  # layers with experts
    moe: MoEShape
    ignored_tensors: tuple[str, ...]  # prefixes of tensors that are ignored

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> KimiLinearConfig:
        config = _with_common_names(config)
        check_silu(config)
        _check_unread(config)
        num_layers = whole(config, "num_hidden_layers")
        shape = HybridShape.read(
            config,
            norm_eps=number(config, "rms_norm_eps", 1e-5),
            max_positions=1 << 20,
            attention=read_latent(config),
            recurrent=_recurrent(config),
            blocks=_blocks(config),
        )
        return cls(
            shape=shape,
            inner_width=whole(config, "intermediate_size", 9216),
            sparse_layers=sparse_layers(config, num_layers),
            moe=shared_beside_routed(config),
            ignored_tensors=draft_layers(config, num_layers),
        )


class KimiLinearModel(HybridModel):
    """A hybrid of Kimi Delta Attention and latent attention."""

    def __init__(
        self,
        config: KimiLinearConfig,
        build: Build,
    ):
        shape, moe = config.shape, config.moe
        attention, recurrent = shape.attention, shape.recurrent
        assert isinstance(attention, LatentShape) and isinstance(recurrent, RecurrentShape)

        def make_block(place: int, cache_index: int) -> nn.Module:
            layer = f"model.layers.{place // 2}"
            name = "post_attention_layernorm" if place % 2 else "input_layernorm"
            norm = RMSNorm(f"{layer}.{name}", shape.width, shape.norm_eps, build)
            if shape.blocks[place] == "recurrent":
                return ChannelDeltaNet(f"{layer}.self_attn", norm, shape.width, recurrent, cache_index, build=build)
            if shape.blocks[place] == "attention":
                return LatentAttention(
                    f"{layer}.self_attn",
                    norm,
                    attention,
                    cache_index,
                    form="absorbed",
                    build=build,
                )
            mixture = f"{layer}.block_sparse_moe"
            if place // 2 in config.sparse_layers:
                names = ExpertNames(
                    mixture,
                    gate="w1",
                    up="w3",
                    down="w2",
                    shared="shared_experts",
                    shared_matrices=("gate_proj", "up_proj", "down_proj"),
                )
                return MoE(names, norm, moe, build=build)
            mlp = GatedMLP(f"{layer}.mlp", norm, shape.width, config.inner_width, bias=False, build=build)
            # transformers saves these under the name of the other layers' mixtures, too.
            add_other_names(mlp.gate_up, f"{mixture}.gate_proj", f"{mixture}.up_proj")
            add_other_names(mlp.down, f"{mixture}.down_proj")
            return mlp

        inner = max(3 * config.inner_width, moe_activations(moe), channel_activations(recurrent))
        super().__init__(
            shape,
            HybridNames("model.embed_tokens", "model.norm"),
            make_block,
            Rope(RopeConfig("none"), attention.rope_dim, build),
            block_activations(shape, inner),
            build=build,
        )
        self._ignored_prefixes = config.ignored_tensors

    def ignored_prefixes(self) -> tuple[str, ...]:
        return self._ignored_prefixes

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> KimiLinearConfig:
        return KimiLinearConfig.from_hf(config)


def _with_common_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Renames all fields to their names in transformers, which the readers of other families use."""
    linear = config.get("linear_attn_config")
    if linear is None:
        linear = {}
    if not isinstance(linear, Mapping):
        raise QuireError("bad_config", f"linear_attn_config={linear!r} must be an object.", "Check config.json.")
    renamed = {
        **{ours: config.get(theirs) for theirs, ours in COMMON_NAMES.items()},
        **{ours: linear.get(theirs) for theirs, ours in LINEAR_NAMES.items()},
    }
    given = {**config, **{key: value for key, value in renamed.items() if value is not None}}
    if given.get("layer_types") is None:
        given["layer_types"] = _listed_layers(linear, whole({**DEFAULTS, **given}, "num_hidden_layers"))
    return {**DEFAULTS, **{key: value for key, value in given.items() if value is not None}}


def _listed_layers(linear: Mapping[str, Any], num_layers: int) -> list[str] | None:
    """Returns layer types from the published lists of layers of either kind, which count from 1."""
    lists = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
    if any(linear.get(key) is None for key in lists):
        return None
    kinds: dict[int, str] = {}
    for key, kind in lists.items():
        check_layer_indices(linear[key], f"{key} of linear_attn_config", num_layers + 1)
        kinds |= dict.fromkeys(linear[key], kind)
    named = sum(len(linear[key]) for key in lists)
    if named != num_layers or set(kinds) != set(range(1, num_layers + 1)):
        what = f"kda_layers and full_attn_layers must name each of the layers 1 to {num_layers} once."
        raise QuireError("bad_config", what, "Check linear_attn_config in config.json.")
    return [kinds[layer] for layer in range(1, num_layers + 1)]


def _check_unread(config: Mapping[str, Any]) -> None:
    """Refuses other values of fields that have one value in all published files."""
    for key, usual in (("mla_use_nope", True), ("moe_router_activation_func", "sigmoid"), ("moe_layer_freq", 1)):
        if config.get(key, usual) != usual:
            what = f"{key}={config[key]!r} of kimi_linear is not supported."
            raise QuireError("unsupported_model", what, f"Supported is {usual!r}.")


def _recurrent(config: Mapping[str, Any]) -> RecurrentShape:
    heads, head_dim = whole(config, "linear_num_heads", 32), whole(config, "linear_head_dim", 128)
    return RecurrentShape(heads, heads, head_dim, head_dim, whole(config, "linear_conv_kernel_dim", 4))


def _blocks(config: Mapping[str, Any]) -> tuple[BlockKind, ...]:
    """Returns the blocks. Without layer lists, every layer whose index is a multiple of 4 attends, except layer 0, as
    in transformers.
    """

    def usual(layer: int) -> str:
        return "full_attention" if layer and layer % 4 == 0 else "linear_attention"

    return mixers_with_mlps(config, LAYER_TYPES, usual)
