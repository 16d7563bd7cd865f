"""Qwen3-Next and Qwen3.5: three gated delta nets, then one gated full attention, each with a feed-forward block.

The generations differ in the checkpoint layout of the delta net's projection and in which layers have experts. The
vision tower and the draft head of Qwen3.5 checkpoints are ignored: only the text model runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quire.kernels.expert_types import Routing
from quire.kernels.recurrent_types import RecurrentShape
from quire.layers.attention import AttentionShape
from quire.layers.build import Build
from quire.layers.experts import ExpertNames, Experts, MoEShape, num_merged_experts
from quire.layers.gated_attention import GatedAttention
from quire.layers.head_layout import HeadOrder
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE, moe_activations
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.gated_delta import DeltaLayout, GatedDeltaNet
from quire.layers.rope import Rope, RopeConfig
from quire.layers.weights import Part, own_weights
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
from quire.models.mtp_head import AttentionThenMLP, HeadForm
from quire.types import QuireError

LAYER_TYPES: dict[str, BlockKind] = {"linear_attention": "recurrent", "full_attention": "attention"}


@dataclass(frozen=True, slots=True)
class QwenHybridConfig:
    """Shape and options of a Qwen3-Next or Qwen3.5 model."""

    shape: HybridShape
    rope: RopeConfig
    rope_dim: int  # elements of a head that rope rotates
    attention_bias: bool
    layout: DeltaLayout  # checkpoint layout of the delta nets
    norm_offset: float  # added to the checkpoint's norm weights
    prefix: str  # of the text model within the checkpoint
    inner_width: int  # of the feed-forward blocks without experts
    moe: MoEShape | None  # None: no layer has experts
    dense_layers: frozenset[int]  # layers without experts in a model with experts

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> QwenHybridConfig:
        kind = config["model_type"]
        text = config.get("text_config")
        prefix = "model"
        if text is not None:  # the multimodal model, with its vision tower
            prefix = "model.language_model"
            config = {"tie_word_embeddings": config.get("tie_word_embeddings", False), **text}
        check_silu(config)
        heads = whole(config, "num_attention_heads", 16)
        kv_heads = whole(config, "num_key_value_heads", 2 if kind == "qwen3_next" else 4)
        head_dim = whole(config, "head_dim", 256)
        rope_dim = _rope_dim(config, head_dim)
        check_attention(heads, kv_heads, head_dim, rope_dim)
        width = whole(config, "hidden_size")
        rope = RopeConfig.from_hf(dict(config))
        order = HeadOrder(head_dim, rope_dim, angle_scale=rope.angle_scale)
        shape = HybridShape.read(
            config,
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            max_positions=32768,
            attention=AttentionShape(width, heads, kv_heads, head_dim, order=order),
            recurrent=_recurrent(config),
            blocks=_blocks(config),
        )
        moe = _moe(config, kind, width)
        return cls(
            shape=shape,
            rope=rope,
            rope_dim=rope_dim,
            attention_bias=flag(config, "attention_bias", False),
            layout=_layout(config, kind),
            norm_offset=number(config, "norm_offset", 1.0),
            prefix=prefix,
            inner_width=whole(config, "intermediate_size", 5632),
            moe=moe,
            dense_layers=_dense_layers(config, len(shape.blocks) // 2),
        )


class QwenHybridModel(HybridModel):
    """A hybrid of gated delta nets and gated attention."""

    def __init__(
        self,
        config: QwenHybridConfig,
        build: Build,
    ):
        shape = config.shape
        attention, recurrent = shape.attention, shape.recurrent
        assert isinstance(attention, AttentionShape) and isinstance(recurrent, RecurrentShape)

        def make_block(place: int, cache_index: int) -> nn.Module:
            layer = f"{config.prefix}.layers.{place // 2}"
            if place % 2:
                return _feed_forward(layer, config, place // 2 not in config.dense_layers, build)
            if shape.blocks[place] == "attention":
                return _attention(layer, config, cache_index, build)
            return GatedDeltaNet(
                f"{layer}.linear_attn",
                _norm(f"{layer}.input_layernorm", config, build),
                shape.width,
                recurrent,
                cache_index,
                layout=config.layout,
                build=build,
            )

        unrotated = attention.head_dim - config.rope_dim
        rope = Rope(config.rope, attention.head_dim, build, unrotated_dim=unrotated)
        names = HybridNames(f"{config.prefix}.embed_tokens", f"{config.prefix}.norm")
        inner = max(3 * config.inner_width, moe_activations(config.moe) if config.moe is not None else 0)
        super().__init__(
            shape,
            names,
            make_block,
            rope,
            block_activations(shape, inner),
            build=build,
            norm_offset=config.norm_offset,
        )
        self._config = config

    def head_form(self) -> HeadForm | None:
        config, layer = self._config, "mtp.layers.0"
        spec = next((spec for spec in self.specs if spec.kind == "paged"), None)
        if spec is None or self.rope is None:
            return None

        def make_layer(build: Build) -> nn.Module:
            return AttentionThenMLP(_attention(layer, config, 0, build), _feed_forward(layer, config, True, build))

        return HeadForm(
            embed_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            project="mtp.fc",
            norm="mtp.norm",
            width=config.shape.width,
            norm_eps=config.shape.norm_eps,
            make_layer=make_layer,
            spec=spec,
            rope=self.rope,
            norm_offset=config.norm_offset,
        )

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> QwenHybridConfig:
        return QwenHybridConfig.from_hf(config)


def _norm(name: str, config: QwenHybridConfig, build: Build) -> RMSNorm:
    return RMSNorm(name, config.shape.width, config.shape.norm_eps, build, config.norm_offset)


def _attention(layer: str, config: QwenHybridConfig, cache_index: int, build: Build) -> GatedAttention:
    shape = config.shape.attention
    assert isinstance(shape, AttentionShape)
    return GatedAttention(
        f"{layer}.self_attn",
        _norm(f"{layer}.input_layernorm", config, build),
        shape,
        cache_index,
        bias=config.attention_bias,
        build=build,
        norm_offset=config.norm_offset,
    )


def _feed_forward(layer: str, config: QwenHybridConfig, has_experts: bool, build: Build) -> nn.Module:
    """Returns a layer's feed-forward block. `has_experts`: if the model has any."""
    norm = _norm(f"{layer}.post_attention_layernorm", config, build)
    if config.moe is not None and has_experts:
        names = ExpertNames(f"{layer}.mlp")
        experts = _experts(names, config.moe, build, num_merged_experts(config.moe, build.ops))
        return MoE(names, norm, config.moe, build=build, experts=experts)
    return GatedMLP(f"{layer}.mlp", norm, config.shape.width, config.inner_width, bias=False, build=build)


def _rope_dim(config: Mapping[str, Any], head_dim: int) -> int:
    """Returns how many elements of a head rope rotates."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise QuireError("bad_config", f"partial_rotary_factor={factor!r} must be a number.", "Check config.json.")
    return int(head_dim * factor)


def _recurrent(config: Mapping[str, Any]) -> RecurrentShape:
    shape = RecurrentShape(
        num_groups=whole(config, "linear_num_key_heads", 16),
        num_heads=whole(config, "linear_num_value_heads", 32),
        key_dim=whole(config, "linear_key_head_dim", 128),
        value_dim=whole(config, "linear_value_head_dim", 128),
        conv_len=whole(config, "linear_conv_kernel_dim", 4),
    )
    check_recurrent(shape)
    return shape


def _layout(config: Mapping[str, Any], kind: str) -> DeltaLayout:
    """Returns the layout of the delta nets. Qwen3-Next groups projections by key head. GGUF files
    (`gguf.hybrid_styles`) group less of it, and those of Qwen3.5 have another order of heads.
    """
    by_group = kind == "qwen3_next"
    return DeltaLayout(
        by_group=by_group and not flag(config, "delta_nets_split", False),
        gates_by_group=by_group,
        tiled=flag(config, "value_heads_tiled", False),
    )


def _blocks(config: Mapping[str, Any]) -> tuple[BlockKind, ...]:
    every = whole(config, "full_attention_interval", 4)
    return mixers_with_mlps(
        config, LAYER_TYPES, lambda layer: "linear_attention" if (layer + 1) % every else "full_attention"
    )


def _moe(config: Mapping[str, Any], kind: str, width: int) -> MoEShape | None:
    if kind in ("qwen3_5", "qwen3_5_text") or (kind == "qwen3_next" and config.get("num_experts") == 0):
        return None
    num_experts, top_k = (512, 10) if kind == "qwen3_next" else (256, 8)
    routing = Routing(
        whole(config, "num_experts", num_experts),
        whole(config, "num_experts_per_tok", top_k),
        normalise=flag(config, "norm_topk_prob", True),
    )
    shared = whole(config, "shared_expert_intermediate_size", 512)
    inner = whole(config, "moe_intermediate_size", 512)
    return MoEShape(width, inner, routing, shared_width=shared, shared_gated=True)


def _dense_layers(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Returns the layers without experts."""
    every = whole(config, "decoder_sparse_step", 1)
    named = config.get("mlp_only_layers") or []
    return frozenset(index for index in range(num_layers) if index in named or (index + 1) % every)


def _experts(names: ExpertNames, shape: MoEShape, build: Build, num_shared: int) -> Experts:
    """Builds the experts. Qwen3.5 also publishes all routed experts of a layer in two tensors, with gate rows before up
    rows.
    """
    experts = Experts.from_names(names, shape, build, num_shared)
    num, inner, width = shape.routing.num_experts, shape.inner_width, shape.width
    sizes = {"gate_up": (2 * inner, width), "down": (width, inner)}
    for name, weight in own_weights(experts):
        rows, columns = sizes[name]
        whole_tensor = Part(f"{names.prefix}.experts.{name}_proj", (num, rows, columns), 0, num * rows)
        shared = (part for part in weight.parts if part.start >= num * rows)
        weight.others = (*weight.others, (whole_tensor, *shared))
    return experts
