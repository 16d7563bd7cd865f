"""Mamba2: recurrent layers only. Also reads Mamba2's config fields for hybrids, and builds the mixers of hybrids with
Mamba2 and attention layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quire.kernels.recurrent_types import RecurrentShape
from quire.layers.attention import Attention, AttentionShape
from quire.layers.build import Build
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.mamba import Mamba2, MambaOptions
from quire.models.families.hybrid import (
    BlockKind,
    HybridModel,
    HybridNames,
    HybridShape,
    block_activations,
    check_recurrent,
)
from quire.models.fields import check_layer_types, check_silu, flag, number, whole
from quire.types import QuireError

MAX_POSITIONS = 65536  # a recurrence has no limit of its own, but rows are allocated for one


@dataclass(frozen=True, slots=True)
class MambaFields:
    """A family's names of the Mamba2 fields."""

    num_heads: str
    head_dim: str
    num_groups: str
    state_size: str
    conv_len: str
    conv_bias: str
    bias: str
    activation: str
    expand: str | None = None  # optional width relative to the hidden size, which must agree
    values: str | None = None  # optional width, which takes precedence

    def shape(self, config: Mapping[str, Any]) -> RecurrentShape:
        """Reads and validates the recurrent shape."""
        width, heads = whole(config, "hidden_size"), whole(config, self.num_heads, 128)
        expanded = None if self.expand is None else int(number(config, self.expand, 2.0) * width)
        if self.values is not None and config.get(self.values) is not None:
            expanded = whole(config, self.values)
        head_dim = config.get(self.head_dim)
        if head_dim in (None, "auto"):
            head_dim = (expanded or 2 * width) // heads
        shape = RecurrentShape(
            num_groups=whole(config, self.num_groups, 8),
            num_heads=heads,
            key_dim=whole(config, self.state_size, 128),
            value_dim=whole({self.head_dim: head_dim}, self.head_dim),
            conv_len=whole(config, self.conv_len, 4),
        )
        check_silu(config, self.activation)
        check_recurrent(shape, expanded)
        return shape

    def options(self, config: Mapping[str, Any], eps: float) -> MambaOptions:
        """Reads the options. The output norm has as many parts as there are groups; transformers before 5.23 had one
        part.
        """
        return MambaOptions(
            eps=eps,
            norm_groups=whole(config, self.num_groups, 8),
            conv_bias=flag(config, self.conv_bias, True),
            bias=flag(config, self.bias, False),
            dt_limits=_limits(config.get("time_step_limit")),
        )


@dataclass(frozen=True, slots=True)
class Mixers:
    """Builds the Mamba2 and attention layers of a hybrid whose checkpoint names them `mamba` and `self_attn`."""

    shape: HybridShape
    options: MambaOptions
    attention_bias: bool
    build: Build

    def make(self, place: int, layer: str, norm: RMSNorm, cache_index: int) -> Mamba2 | Attention:
        shape, build = self.shape, self.build
        if shape.blocks[place] == "recurrent":
            assert isinstance(shape.recurrent, RecurrentShape)
            return Mamba2(
                f"{layer}.mamba",
                norm,
                shape.width,
                shape.recurrent,
                cache_index,
                self.options,
                build=build,
            )
        assert isinstance(shape.attention, AttentionShape)
        bias = self.attention_bias
        return Attention(
            f"{layer}.self_attn",
            norm,
            shape.attention,
            cache_index,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=None,
            build=build,
        )


FIELDS = MambaFields(
    "num_heads",
    "head_dim",
    "n_groups",
    "state_size",
    "conv_kernel",
    "use_conv_bias",
    "use_bias",
    "hidden_act",
    expand="expand",
)


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Shape and options of a Mamba2 model."""

    shape: HybridShape
    options: MambaOptions

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Mamba2Config:
        eps = number(config, "layer_norm_epsilon", 1e-5)
        num_layers = whole(config, "num_hidden_layers")
        check_layer_types(config.get("layer_types"), ("linear_attention", "mamba"), num_layers)
        blocks: list[BlockKind] = ["recurrent"] * num_layers
        shape = HybridShape.read(
            config,
            norm_eps=eps,
            max_positions=MAX_POSITIONS,
            attention=None,
            recurrent=FIELDS.shape(config),
            blocks=tuple(blocks),
        )
        return cls(shape, FIELDS.options(config, eps))


class Mamba2Model(HybridModel):
    """A model of Mamba2 layers only."""

    def __init__(
        self,
        config: Mamba2Config,
        build: Build,
    ):
        shape = config.shape
        recurrent = shape.recurrent
        assert isinstance(recurrent, RecurrentShape)

        def make_block(place: int, cache_index: int) -> nn.Module:
            layer = f"backbone.layers.{place}"
            norm = RMSNorm(f"{layer}.norm", shape.width, shape.norm_eps, build)
            return Mamba2(
                f"{layer}.mixer",
                norm,
                shape.width,
                recurrent,
                cache_index,
                config.options,
                build=build,
            )

        super().__init__(
            shape,
            HybridNames("backbone.embeddings", "backbone.norm_f"),
            make_block,
            None,
            block_activations(shape, 0),
            build=build,
        )

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> Mamba2Config:
        return Mamba2Config.from_hf(config)


def _limits(given: Any) -> tuple[float, float]:
    """Returns the limits of time steps, unbounded by default."""
    if given is None:
        return 0.0, float("inf")
    if len(given) != 2 or not all(isinstance(value, (int, float)) for value in given):
        raise QuireError("bad_config", f"time_step_limit={given!r} must be two numbers.", "Check config.json.")
    return float(given[0]), float(given[1])
