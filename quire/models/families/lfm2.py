"""LFM2: gated short convolutions and some attention layers, each with a feed-forward block, or with experts in most
layers (`lfm2_moe`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quire.kernels.expert_types import Routing
from quire.kernels.recurrent_types import ConvShape
from quire.layers.attention import Attention, AttentionNames, AttentionShape
from quire.layers.build import Build
from quire.layers.experts import ExpertNames, MoEShape
from quire.layers.mlp import GatedMLP, MLPNames
from quire.layers.moe import MoE, moe_activations
from quire.layers.norm import QKNorm, RMSNorm
from quire.layers.recurrent.short_conv import ShortConv
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
from quire.models.fields import check_layer_indices, flag, number, whole

LAYER_TYPES: dict[str, BlockKind] = {"conv": "recurrent", "full_attention": "attention"}
ATTENTION_NAMES = AttentionNames(out="out_proj")
MLP_NAMES = MLPNames(("w1", "w3"), "w2")
EXPERT_NAMES = ExpertNames("feed_forward", gate="w1", up="w3", down="w2", choice_bias="expert_bias")


@dataclass(frozen=True, slots=True)
class Lfm2Config:
    """Shape and options of an LFM2 model."""

    shape: HybridShape
    conv: ConvShape
    rope: RopeConfig
    conv_bias: bool
    inner_width: int
    moe: MoEShape | None
    num_dense: int  # leading layers without experts

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Lfm2Config:
        config = _renamed(config)
        has_experts = config["model_type"] == "lfm2_moe"
        width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads", 32)
        kv_heads, head_dim = whole(config, "num_key_value_heads", 8), whole(config, "head_dim", width // heads)
        check_attention(heads, kv_heads, head_dim)
        conv = ConvShape(width, whole(config, "conv_L_cache", 3))
        num_layers = whole(config, "num_hidden_layers", 32)
        attending = config.get("full_attn_idxs")
        check_layer_indices(attending, "full_attn_idxs", num_layers)

        def usual(layer: int) -> str:
            return "full_attention" if attending is None or layer in attending else "conv"

        shape = HybridShape.read(
            config,
            norm_eps=number(config, "norm_eps", 1e-5),
            max_positions=128_000,
            attention=AttentionShape(width, heads, kv_heads, head_dim),
            recurrent=conv,
            blocks=mixers_with_mlps(config, LAYER_TYPES, usual),
        )
        return cls(
            shape=shape,
            conv=conv,
            rope=RopeConfig.from_hf({"rope_theta": 1e6, **config}),
            conv_bias=flag(config, "conv_bias", False),
            inner_width=whole(config, "intermediate_size", 7168) if has_experts else _inner_width(config),
            moe=_moe(config, width) if has_experts else None,
            num_dense=_num_dense(config, num_layers) if has_experts else num_layers,
        )


class Lfm2Model(HybridModel):
    """A hybrid of short convolutions and attention."""

    def __init__(
        self,
        config: Lfm2Config,
        build: Build,
    ):
        shape = config.shape
        attention = shape.attention
        assert isinstance(attention, AttentionShape)

        def feed_forward(layer: str, index: int, norm: RMSNorm) -> nn.Module:
            if config.moe is not None and index >= config.num_dense:
                return MoE(EXPERT_NAMES.below(layer), norm, config.moe, build=build)
            return GatedMLP(
                f"{layer}.feed_forward",
                norm,
                shape.width,
                config.inner_width,
                bias=False,
                build=build,
                names=MLP_NAMES,
            )

        def make_block(place: int, cache_index: int) -> nn.Module:
            layer = f"model.layers.{place // 2}"
            name = "ffn_norm" if place % 2 else "operator_norm"
            norm = RMSNorm(f"{layer}.{name}", shape.width, shape.norm_eps, build)
            match shape.blocks[place]:
                case "recurrent":
                    return ShortConv(
                        f"{layer}.conv",
                        norm,
                        config.conv,
                        cache_index,
                        bias=config.conv_bias,
                        build=build,
                    )
                case "attention":
                    heads = QKNorm(
                        f"{layer}.self_attn",
                        attention.head_dim,
                        shape.norm_eps,
                        build,
                        names=("q_layernorm", "k_layernorm"),
                    )
                    return Attention(
                        f"{layer}.self_attn",
                        norm,
                        attention,
                        cache_index,
                        qkv_bias=False,
                        out_bias=False,
                        qk_norm=heads,
                        build=build,
                        names=ATTENTION_NAMES,
                    )
                case _:
                    return feed_forward(layer, place // 2, norm)

        rope = Rope(config.rope, attention.head_dim, build)
        inner = max(3 * config.inner_width, 0 if config.moe is None else moe_activations(config.moe))
        super().__init__(
            shape,
            HybridNames("model.embed_tokens", "model.embedding_norm"),
            make_block,
            rope,
            block_activations(shape, inner),
            build=build,
        )

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> Lfm2Config:
        return Lfm2Config.from_hf(config)


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Renames two fields of published files, which take precedence over transformers' names."""
    fields = {"tie_word_embeddings": True, **config}
    for ours, theirs in (("tie_word_embeddings", "tie_embedding"), ("intermediate_size", "block_ff_dim")):
        if config.get(theirs) is not None:
            fields[ours] = config[theirs]
    return fields


def _inner_width(config: Mapping[str, Any]) -> int:
    """Returns the inner width. The config may give that of a block without a gate; then it is two thirds of that,
    rounded up.
    """
    inner = whole(config, "intermediate_size", 12288)
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    if config.get("block_ffn_dim_multiplier", 1.0) is None:
        return inner
    multiple = whole(config, "block_multiple_of", 256)
    return -(-int(number(config, "block_ffn_dim_multiplier", 1.0) * inner) // multiple) * multiple


def _moe(config: Mapping[str, Any], width: int) -> MoEShape:
    routing = Routing(
        whole(config, "num_experts", 32),
        whole(config, "num_experts_per_tok", 4),
        score="sigmoid",
        normalise=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 1.0),
    )
    inner = whole(config, "moe_intermediate_size", 1792)
    return MoEShape(width, inner, routing, choice_bias=flag(config, "use_expert_bias", True))


def _num_dense(config: Mapping[str, Any], num_layers: int) -> int:
    num_dense = config.get("num_dense_layers", 2)
    return 0 if num_dense == 0 else min(whole({"num_dense_layers": num_dense}, "num_dense_layers", 2), num_layers)
