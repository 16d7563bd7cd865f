"""Falcon-H1: in every layer attention and a Mamba2 layer in parallel, then a feed-forward block. Most parts have
multipliers; those of matrix products are multiplied into their matrices while loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from quire.kernels.angles import Angles
from quire.kernels.recurrent_types import RecurrentShape
from quire.layers.attention import Attention, AttentionPlan, AttentionShape
from quire.layers.build import Build
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.mamba import Mamba2, MambaOptions
from quire.layers.recurrent.state import RecurrentLayersPlan
from quire.layers.rope import Rope, RopeConfig
from quire.layers.weights import ScaleRows, scale_by, set_forms
from quire.models.families.hybrid import (
    BlockKind,
    HybridModel,
    HybridNames,
    HybridShape,
    block_activations,
    check_attention,
    mixers_with_mlps,
)
from quire.models.families.mamba2 import MambaFields
from quire.models.fields import check_silu, flag, number, whole
from quire.types import QuireError

FIELDS = MambaFields(
    "mamba_n_heads",
    "mamba_d_head",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "hidden_act",
    "mamba_expand",
    "mamba_d_ssm",
)
DEFAULTS = {"mamba_d_ssm": 1024, "mamba_n_groups": 1, "mamba_d_state": 256, "num_key_value_heads": 8}
LAYER_TYPES: dict[str, BlockKind] = {"hybrid": "parallel"}


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Multipliers of config.json."""

    attention_in: float
    attention_out: float
    key: float
    mamba_in: float
    mamba_out: float
    mamba_parts: tuple[float, ...]  # of gate, values, keys, queries and time steps
    gate: float  # of the feed-forward block
    down: float

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Multipliers:
        gate, down = _numbers(config, "mlp_multipliers", 2)
        return cls(
            attention_in=number(config, "attention_in_multiplier", 1.0),
            attention_out=number(config, "attention_out_multiplier", 1.0),
            key=number(config, "key_multiplier", 1.0),
            mamba_in=number(config, "ssm_in_multiplier", 1.0),
            mamba_out=number(config, "ssm_out_multiplier", 1.0),
            mamba_parts=_numbers(config, "ssm_multipliers", 5),
            gate=gate,
            down=down,
        )


@dataclass(frozen=True, slots=True)
class FalconH1Config:
    """Shape, multipliers and options of a Falcon-H1 model."""

    shape: HybridShape
    options: MambaOptions
    multipliers: Multipliers
    rope: RopeConfig
    inner_width: int
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> FalconH1Config:
        config = {**DEFAULTS, **config}
        check_silu(config)
        width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads", 32)
        kv_heads, head_dim = whole(config, "num_key_value_heads", heads), whole(config, "head_dim", width // heads)
        check_attention(heads, kv_heads, head_dim)
        eps = number(config, "rms_norm_eps", 1e-5)
        recurrent = FIELDS.shape(config)
        kinds = config.get("layers_block_type") or config.get("layer_types")
        shape = HybridShape.read(
            config,
            norm_eps=eps,
            max_positions=8192,
            attention=AttentionShape(width, heads, kv_heads, head_dim),
            recurrent=recurrent,
            blocks=mixers_with_mlps({**config, "layer_types": kinds}, LAYER_TYPES, lambda layer: "hybrid"),
            embedding_scale=number(config, "embedding_multiplier", 1.0),
            logit_scale=number(config, "lm_head_multiplier", 1.0),
        )
        options = replace(
            FIELDS.options(config, eps),
            norm=flag(config, "mamba_rms_norm", False),
            gate_first=not flag(config, "mamba_norm_before_gate", True),
            out_bias=flag(config, "projectors_bias", False),
        )
        return cls(
            shape=shape,
            options=options,
            multipliers=Multipliers.read(config),
            rope=RopeConfig.from_hf(dict(config)),
            inner_width=whole(config, "intermediate_size", 14336),
            attention_bias=flag(config, "attention_bias", False),
            mlp_bias=flag(config, "mlp_bias", False),
        )


class ParallelMixers(nn.Module):
    """Attention and a Mamba2 layer in parallel: both read the same stream, through the same norm."""

    def __init__(self, attention: Attention, mamba: Mamba2):
        super().__init__()
        self.attention = attention
        self.mamba = mamba

    def forward(
        self, stream: Tensor, angles: Angles, attention: AttentionPlan, recurrent: RecurrentLayersPlan
    ) -> Tensor:
        """Adds both outputs to stream [tokens, width], for the tokens that attend."""
        # first, since the Mamba2 layer may write to the stream's memory
        attended = self.attention.attend(stream, angles, attention)
        stream = attention.pick(self.mamba(stream, recurrent))
        return self.attention.join(self.attention.out, attended, stream) if len(stream) else stream


class FalconH1Model(HybridModel):
    """A hybrid of parallel attention and Mamba2 layers."""

    def __init__(
        self,
        config: FalconH1Config,
        build: Build,
    ):
        shape, by = config.shape, config.multipliers
        attention, recurrent = shape.attention, shape.recurrent
        assert isinstance(attention, AttentionShape) and isinstance(recurrent, RecurrentShape)

        def make_block(place: int, cache_index: int) -> nn.Module:
            layer = f"model.layers.{place // 2}"
            name = "pre_ff_layernorm" if place % 2 else "input_layernorm"
            norm = RMSNorm(f"{layer}.{name}", shape.width, shape.norm_eps, build)
            if shape.blocks[place] == "plain":
                block = GatedMLP(
                    f"{layer}.feed_forward",
                    norm,
                    shape.width,
                    config.inner_width,
                    bias=config.mlp_bias,
                    build=build,
                )
                set_forms(block.gate_up, (scale_by(by.gate), None))
                set_forms(block.down, (scale_by(by.down),))
                return block
            bias = config.attention_bias
            attending = Attention(
                f"{layer}.self_attn",
                norm,
                attention,
                cache_index,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=None,
                build=build,
            )
            mamba = Mamba2(
                f"{layer}.mamba",
                norm,
                shape.width,
                recurrent,
                cache_index,
                config.options,
                build=build,
            )
            _scale_mixers(attending, mamba, recurrent, by)
            return ParallelMixers(attending, mamba)

        rope = Rope(config.rope, attention.head_dim, build)
        attended = attention.num_heads * attention.head_dim  # held while the Mamba2 layer runs
        super().__init__(
            shape,
            HybridNames("model.embed_tokens", "model.final_layernorm"),
            make_block,
            rope,
            block_activations(shape, 3 * config.inner_width) + attended,
            build=build,
        )

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> FalconH1Config:
        return FalconH1Config.from_hf(config)


def _scale_mixers(attention: Attention, mamba: Mamba2, shape: RecurrentShape, by: Multipliers) -> None:
    """Multiplies the multipliers into the matrices. A factor on a product's input does not apply to its bias."""
    rows = (shape.values, shape.values, shape.keys, shape.keys, shape.num_heads)
    for only, inputs in (("weight", by.attention_in), ("bias", 1.0)):
        set_forms(attention.qkv, (scale_by(inputs), scale_by(inputs * by.key), scale_by(inputs)), only)
    for only, inputs in (("weight", by.mamba_in), ("bias", 1.0)):
        parts = tuple(zip(rows, (inputs * part for part in by.mamba_parts), strict=True))
        set_forms(mamba.project, (ScaleRows(parts) if any(part != 1.0 for _, part in parts) else None,), only)
    set_forms(attention.out, (scale_by(by.attention_out),))
    set_forms(mamba.out, (scale_by(by.mamba_out),))


def _numbers(config: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    """Returns a list of `count` numbers, all 1 by default."""
    given = config.get(key)
    if given is None:
        return (1.0,) * count
    numbers = isinstance(given, (list, tuple)) and all(
        isinstance(each, (int, float)) and not isinstance(each, bool) for each in given
    )
    if not numbers or len(given) != count:
        raise QuireError("bad_config", f"{key}={given!r} must be {count} numbers.", "Check config.json.")
    return tuple(float(each) for each in given)
