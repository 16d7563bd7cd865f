"""OLMo Hybrid: three gated delta nets, then one full attention, each with a feed-forward block. Layers with delta nets
have norms before the blocks, attention layers after them. Published models have no rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quire.kernels.recurrent_types import RecurrentShape
from quire.layers.attention import Attention, AttentionShape
from quire.layers.build import Build
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm, WideQKNorm
from quire.layers.recurrent.gated_delta import DeltaLayout, GatedDeltaNet
from quire.layers.residual_join import ResidualJoin
from quire.layers.rope import Rope, RopeConfig
from quire.layers.weights import add_other_names
from quire.models.families.hybrid import (
    BlockKind,
    HybridModel,
    HybridNames,
    HybridShape,
    block_activations,
    check_attention,
    check_recurrent,
    mixers_with_mlps,
)
from quire.models.fields import check_silu, flag, number, whole

LAYER_TYPES: dict[str, BlockKind] = {"linear_attention": "recurrent", "full_attention": "attention"}
GATED_EPS = 1e-5  # of the norm before a delta net's gate, whatever `rms_norm_eps` is
OTHER_NAMES = {  # names in published files; transformers saves the second in attention layers, too
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}


@dataclass(frozen=True, slots=True)
class OlmoHybridConfig:
    """Shape and options of an OLMo Hybrid model."""

    shape: HybridShape
    rope: RopeConfig
    attention_bias: bool
    inner_width: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> OlmoHybridConfig:
        check_silu(config)
        width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads", 30)
        kv_heads, head_dim = whole(config, "num_key_value_heads", heads), whole(config, "head_dim", width // heads)
        check_attention(heads, kv_heads, head_dim)
        shape = HybridShape.read(
            config,
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            max_positions=65536,
            attention=AttentionShape(width, heads, kv_heads, head_dim),
            recurrent=_recurrent(config, width, heads),
            blocks=_blocks(config),
        )
        return cls(
            shape=shape,
            rope=_rope(config),
            attention_bias=flag(config, "attention_bias", False),
            inner_width=whole(config, "intermediate_size", 11008),
        )


class OlmoHybridModel(HybridModel):
    """A hybrid of gated delta nets and attention."""

    def __init__(
        self,
        config: OlmoHybridConfig,
        build: Build,
    ):
        shape, bias = config.shape, config.attention_bias
        attention, recurrent = shape.attention, shape.recurrent
        assert isinstance(attention, AttentionShape) and isinstance(recurrent, RecurrentShape)
        head_rows, kv_rows = (num * attention.head_dim for num in (attention.num_heads, attention.num_kv_heads))

        def norm(layer: str, name: str) -> RMSNorm:
            made = RMSNorm(f"{layer}.{name}", shape.width, shape.norm_eps, build)
            if name in OTHER_NAMES:
                add_other_names(made, f"{layer}.{OTHER_NAMES[name]}")
            return made

        def feed_forward(layer: str, before: RMSNorm | None, join: ResidualJoin | None) -> GatedMLP:
            return GatedMLP(
                f"{layer}.mlp",
                before,
                shape.width,
                config.inner_width,
                bias=False,
                build=build,
                join=join,
            )

        def make_block(place: int, cache_index: int) -> nn.Module:
            layer = f"model.layers.{place // 2}"
            if shape.blocks[place - place % 2] == "recurrent":
                if place % 2:
                    return feed_forward(layer, norm(layer, "post_attention_layernorm"), None)
                return GatedDeltaNet(
                    f"{layer}.linear_attn",
                    norm(layer, "input_layernorm"),
                    shape.width,
                    recurrent,
                    cache_index,
                    layout=DeltaLayout(apart=True),
                    build=build,
                    gated_eps=GATED_EPS,
                )
            if place % 2:
                return feed_forward(layer, None, ResidualJoin(norm(layer, "post_feedforward_layernorm")))
            heads = WideQKNorm(f"{layer}.self_attn", head_rows, kv_rows, attention.head_dim, shape.norm_eps, build)
            return Attention(
                f"{layer}.self_attn",
                None,
                attention,
                cache_index,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=heads,
                build=build,
                join=ResidualJoin(norm(layer, "post_attention_layernorm")),
            )

        super().__init__(
            shape,
            HybridNames("model.embed_tokens", "model.norm"),
            make_block,
            Rope(config.rope, attention.head_dim, build),
            block_activations(shape, 3 * config.inner_width),
            build=build,
        )

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> OlmoHybridConfig:
        return OlmoHybridConfig.from_hf(config)


def _recurrent(config: Mapping[str, Any], width: int, heads: int) -> RecurrentShape:
    groups = whole(config, "linear_num_key_heads", heads)
    key_dim = whole(config, "linear_key_head_dim", int(0.75 * width / groups))
    shape = RecurrentShape(
        num_groups=groups,
        num_heads=whole(config, "linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=whole(config, "linear_value_head_dim", 2 * key_dim),
        conv_len=whole(config, "linear_conv_kernel_dim", 4),
        beta_top=2.0 if flag(config, "linear_allow_neg_eigval", True) else 1.0,
    )
    check_recurrent(shape)
    return shape


def _blocks(config: Mapping[str, Any]) -> tuple[BlockKind, ...]:
    """Every fourth layer attends, or the last layer of a model with fewer than four."""
    last = whole(config, "num_hidden_layers", 32) - 1

    def usual(layer: int) -> str:
        return "full_attention" if layer % 4 == 3 or layer == last < 3 else "linear_attention"

    return mixers_with_mlps(config, LAYER_TYPES, usual)


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """Returns the rope. A null `rope_theta` means no rope; an absent one has the default."""
    rope = RopeConfig.from_hf(dict(config))
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = given.get("rope_theta", config.get("rope_theta", rope.theta))
    return RopeConfig("none") if theta is None else rope
