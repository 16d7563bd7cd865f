"""gpt-oss: attention with sinks and alternating windows, experts with biases and a clamped gate.

Everything except the experts is `DenseModel`'s. Published checkpoints have experts in MXFP4, those saved by
transformers in floats. Both stack all experts and interleave gate and up rows, which are reordered while loading. GGUF
files have separate gate and up tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.expert_types import GatedActivation, Routing
from quire.layers.build import Build
from quire.layers.experts import ExpertNames, Experts, MoEShape
from quire.layers.moe import MoE, moe_activations
from quire.layers.norm import Norm
from quire.layers.residual_join import ResidualJoin
from quire.layers.weights import Form, Part, Reorder, Weight
from quire.models.families.dense.config import DenseConfig, read_common
from quire.models.families.dense.decoder import DenseModel
from quire.models.fields import number, whole

DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "rope_theta": 150000.0,
}
ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


@dataclass(frozen=True, slots=True)
class GptOssConfig:
    """The dense part and the experts of a gpt-oss model."""

    dense: DenseConfig
    shape: MoEShape

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GptOssConfig:
        if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
            config = {**config, "rope_parameters": ROPE}
        dense = read_common({**DEFAULTS, **config})
        if config.get("layer_types") is None:  # full attention in every second layer
            window = whole(config, "sliding_window", DEFAULTS["sliding_window"])
            dense = replace(dense, windows=tuple(None if i % 2 else window for i in range(dense.num_layers)))
        shape = MoEShape(
            dense.width,
            dense.inner_width,
            Routing(whole(config, "num_local_experts"), whole(config, "num_experts_per_tok")),
            GatedActivation(number(config, "swiglu_alpha", 1.702), 1.0, number(config, "swiglu_limit", 7.0)),
            router_bias=True,
        )
        return cls(replace(dense, sinks=True), shape)


class GptOssModel(DenseModel):
    """`DenseModel` with sinks, and experts as feed-forward blocks."""

    def __init__(
        self,
        config: GptOssConfig,
        build: Build,
    ):
        def feed_forward(index: int, norm: Norm | None, join: ResidualJoin) -> nn.Module:
            prefix = f"model.layers.{index}.mlp"
            experts = stacked_experts(f"{prefix}.experts", config.shape, build)
            names = ExpertNames(prefix, router="router")
            return MoE(names, norm, config.shape, build=build, experts=experts, join=join)

        super().__init__(
            config.dense,
            build=build,
            feed_forward=feed_forward,
        )
        self.activation_elements = max(self.activation_elements, 4 * config.dense.width + moe_activations(config.shape))

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> GptOssConfig:
        return GptOssConfig.from_hf(config)


def stacked_experts(prefix: str, shape: MoEShape, build: Build) -> Experts:
    """Builds the experts from stacked tensors, in any of the checkpoint layouts."""
    num, inner, width = shape.routing.num_experts, shape.inner_width, shape.width

    def parts(name: str, entry: tuple[int, ...], rows: int, form: Form | None) -> tuple[Part, ...]:
        """Returns a part per expert, so that one expert is decoded at a time."""
        return tuple(
            Part(f"{prefix}.{name}", (num, *entry), e * rows, (e + 1) * rows, index=e, form=form) for e in range(num)
        )

    def apart(kind: str, *columns: int) -> tuple[Part, ...]:
        """Returns the parts of gate and up projections from two tensors."""
        return tuple(
            Part(f"{prefix}.{name}.{kind}", (num, inner, *columns), start, start + inner, index=e)
            for e in range(num)
            for name, start in (("gate_proj", 2 * e * inner), ("up_proj", (2 * e + 1) * inner))
        )

    gate_up = Weight(
        (num * 2 * inner, width),
        build.dtype,
        parts("gate_up_proj", (width, 2 * inner), 2 * inner, _columns_in_turn),
        (parts("gate_up_proj_blocks", (2 * inner, width), 2 * inner, Reorder(_rows_in_turn)), apart("weight", width)),
    )
    down = Weight(
        (num * width, inner),
        build.dtype,
        parts("down_proj", (inner, width), width, torch.t),
        (
            parts("down_proj_blocks", (width, inner), width, None),
            parts("down_proj.weight", (width, inner), width, None),
        ),
    )
    gate_up_bias = Weight(
        (num * 2 * inner,),
        build.dtype,
        parts("gate_up_proj_bias", (2 * inner,), 2 * inner, Reorder(_rows_in_turn)),
        (apart("bias"),),
    )
    down_bias = Weight(
        (num * width,),
        build.dtype,
        parts("down_proj_bias", (width,), width, None),
        (parts("down_proj.bias", (width,), width, None),),
    )
    return Experts(gate_up, down, gate_up_bias, down_bias, num, shape.activation, build)


def _rows_in_turn(rows: Tensor) -> Tensor:
    """Deinterleaves [2 * inner, ...] into gate rows, then up rows."""
    return torch.cat((rows[0::2], rows[1::2]))


def _columns_in_turn(columns: Tensor) -> Tensor:
    """Transposes and deinterleaves [width, 2 * inner] into [2 * inner, width], gate rows, then up rows."""
    return _rows_in_turn(columns.t())
