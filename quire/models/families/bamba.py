"""Bamba: Mamba2 layers and some attention layers, which rotate half of each head, each with a feed-forward block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quire.layers.attention import AttentionShape
from quire.layers.build import Build
from quire.layers.head_layout import HeadOrder
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.mamba import MambaOptions
from quire.layers.rope import Rope, RopeConfig
from quire.models.families.hybrid import (
    BlockKind,
    HybridModel,
    HybridNames,
    HybridShape,
    block_activations,
    check_attention,
    mixers_with_mlps,
)
from quire.models.families.mamba2 import MambaFields, Mixers
from quire.models.fields import check_silu, flag, number, whole

FIELDS = MambaFields(
    "mamba_n_heads",
    "mamba_d_head",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "hidden_act",
    expand="mamba_expand",
)
LAYER_TYPES: dict[str, BlockKind] = {
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "full_attention": "attention",
    "attention": "attention",
}


@dataclass(frozen=True, slots=True)
class BambaConfig:
    """Shape and options of a Bamba model."""

    shape: HybridShape
    options: MambaOptions
    rope: RopeConfig
    inner_width: int
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BambaConfig:
        check_silu(config)
        width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads", 32)
        kv_heads = whole(config, "num_key_value_heads", heads)
        head_dim = whole(config, "head_dim", width // heads)
        check_attention(heads, kv_heads, head_dim, head_dim // 2)
        eps = number(config, "rms_norm_eps", 1e-5)
        rope = RopeConfig.from_hf(dict(config))
        order = HeadOrder(head_dim, head_dim // 2, angle_scale=rope.angle_scale)
        attending = config.get("attn_layer_indices") or ()
        shape = HybridShape.read(
            config,
            norm_eps=eps,
            max_positions=262144,
            attention=AttentionShape(width, heads, kv_heads, head_dim, order=order),
            recurrent=FIELDS.shape(config),
            blocks=mixers_with_mlps(config, LAYER_TYPES, lambda layer: "attention" if layer in attending else "mamba"),
        )
        return cls(
            shape=shape,
            options=FIELDS.options(config, eps),
            rope=rope,
            inner_width=whole(config, "intermediate_size", 14336),
            attention_bias=flag(config, "attention_bias", False),
            mlp_bias=flag(config, "mlp_bias", False),
        )


class BambaModel(HybridModel):
    """A hybrid of Mamba2 and attention layers."""

    def __init__(
        self,
        config: BambaConfig,
        build: Build,
    ):
        shape = config.shape
        attention = shape.attention
        assert isinstance(attention, AttentionShape)
        unrotated = attention.head_dim - attention.head_dim // 2
        mixers = Mixers(shape, config.options, config.attention_bias, build)

        def make_block(place: int, cache_index: int) -> nn.Module:
            layer = f"model.layers.{place // 2}"
            name = "pre_ff_layernorm" if place % 2 else "input_layernorm"
            norm = RMSNorm(f"{layer}.{name}", shape.width, shape.norm_eps, build)
            if shape.blocks[place] != "plain":
                return mixers.make(place, layer, norm, cache_index)
            return GatedMLP(
                f"{layer}.feed_forward",
                norm,
                shape.width,
                config.inner_width,
                bias=config.mlp_bias,
                build=build,
            )

        rope = Rope(config.rope, attention.head_dim, build, unrotated_dim=unrotated)
        names = HybridNames("model.embed_tokens", "model.final_layernorm")
        super().__init__(
            shape,
            names,
            make_block,
            rope,
            block_activations(shape, 3 * config.inner_width),
            build=build,
        )

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> BambaConfig:
        return BambaConfig.from_hf(config)
