"""Granite 4: Mamba2 layers and some attention layers, mostly without rope, each with a shared feed-forward block and
optionally experts. Blocks' outputs are scaled, which is multiplied into their last matrices while loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quire.kernels.expert_types import Routing
from quire.layers.attention import AttentionShape
from quire.layers.build import Build
from quire.layers.experts import MoEShape
from quire.layers.head_layout import HeadOrder
from quire.layers.moe import moe_activations
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.mamba import MambaOptions
from quire.layers.rope import Rope, RopeConfig
from quire.layers.weights import scale_by, set_forms
from quire.models.families.bamba import FIELDS, LAYER_TYPES
from quire.models.families.granite_moe import EXPERT_NAMES, granite_mixture, granite_shared
from quire.models.families.hybrid import (
    HybridModel,
    HybridNames,
    HybridShape,
    block_activations,
    check_attention,
    mixers_with_mlps,
)
from quire.models.families.mamba2 import Mixers
from quire.models.fields import check_silu, flag, number, whole


@dataclass(frozen=True, slots=True)
class GraniteHybridConfig:
    """Shape and options of a Granite 4 model."""

    shape: HybridShape
    options: MambaOptions
    rope: RopeConfig
    rope_dim: int  # elements of a head that rope rotates
    attention_bias: bool
    shared_width: int
    experts: MoEShape | None
    residual_scale: float  # of each block's output

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GraniteHybridConfig:
        check_silu(config)
        width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads", 32)
        kv_heads, head_dim = whole(config, "num_key_value_heads", heads), whole(config, "head_dim", width // heads)
        eps = number(config, "rms_norm_eps", 1e-6)
        shared_width, experts = whole(config, "shared_intermediate_size", 1024), None
        if config.get("num_local_experts", 8):
            routing = Routing(whole(config, "num_local_experts", 8), whole(config, "num_experts_per_tok", 2))
            inner = whole(config, "intermediate_size", 11008)
            experts = MoEShape(width, inner, routing, shared_width=shared_width)
        has_rope = config.get("position_embedding_type") == "rope"
        rope = RopeConfig.from_hf(dict(config)) if has_rope else RopeConfig("none")
        rope_dim = int(head_dim * number(config, "partial_rotary_factor", 1.0)) if has_rope else head_dim
        check_attention(heads, kv_heads, head_dim, rope_dim)
        order = None if rope_dim == head_dim else HeadOrder(head_dim, rope_dim, angle_scale=rope.angle_scale)
        attention_scale = number(config, "attention_multiplier", 1.0)
        shape = HybridShape.read(
            config,
            norm_eps=eps,
            max_positions=2048,
            attention=AttentionShape(width, heads, kv_heads, head_dim, scale=attention_scale, order=order),
            recurrent=FIELDS.shape(config),
            blocks=mixers_with_mlps(config, LAYER_TYPES, lambda layer: "linear_attention"),
            embedding_scale=number(config, "embedding_multiplier", 1.0),
            logit_scale=1.0 / number(config, "logits_scaling", 1.0),
        )
        return cls(
            shape=shape,
            options=FIELDS.options(config, eps),
            rope=rope,
            rope_dim=rope_dim,
            attention_bias=flag(config, "attention_bias", False),
            shared_width=shared_width,
            experts=experts,
            residual_scale=number(config, "residual_multiplier", 1.0),
        )


class GraniteHybridModel(HybridModel):
    """A hybrid of Mamba2 and attention layers with shared blocks and experts."""

    def __init__(
        self,
        config: GraniteHybridConfig,
        build: Build,
    ):
        shape = config.shape
        attention = shape.attention
        assert isinstance(attention, AttentionShape)
        scale = scale_by(config.residual_scale)
        mixers = Mixers(shape, config.options, config.attention_bias, build)

        def feed_forward(layer: str, norm: RMSNorm) -> nn.Module:
            experts = config.experts
            if experts is None:
                return granite_shared(layer, norm, shape.width, config.shared_width, scale, build)
            names = EXPERT_NAMES.below(layer)
            return granite_mixture(layer, names, norm, experts, scale, build=build)

        def make_block(place: int, cache_index: int) -> nn.Module:
            layer = f"model.layers.{place // 2}"
            name = "post_attention_layernorm" if place % 2 else "input_layernorm"
            norm = RMSNorm(f"{layer}.{name}", shape.width, shape.norm_eps, build)
            if shape.blocks[place] == "plain":
                return feed_forward(layer, norm)
            block = mixers.make(place, layer, norm, cache_index)
            set_forms(block.out, (scale,))
            return block

        unrotated = attention.head_dim - config.rope_dim
        rope = Rope(config.rope, attention.head_dim, build, unrotated_dim=unrotated)
        inner = 3 * config.shared_width if config.experts is None else moe_activations(config.experts)
        super().__init__(
            shape,
            HybridNames("model.embed_tokens", "model.norm"),
            make_block,
            rope,
            block_activations(shape, inner),
            build=build,
        )

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> GraniteHybridConfig:
        return GraniteHybridConfig.from_hf(config)
