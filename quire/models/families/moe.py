"""Decoders with dense attention and a mixture of experts in most layers: Mixtral, Qwen2-MoE, Granite 3, and others.

Everything except the feed-forward blocks is `DenseModel`'s. The registry names `MoEModel`; `moe_families` lists
families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from quire.layers.build import Build
from quire.layers.experts import ExpertNames, MoEShape
from quire.layers.moe import MoE, moe_activations
from quire.layers.norm import Norm
from quire.layers.residual_join import ResidualJoin
from quire.layers.weights import scale_by, set_forms
from quire.models.families.dense.config import DenseConfig
from quire.models.families.dense.decoder import DenseLayer, DenseModel, FeedForward
from quire.models.families.granite_moe import granite_mixture
from quire.models.families.moe_families import MOE, draft_layers, sparse_layers
from quire.models.fields import check_silu, with_defaults
from quire.models.mtp_head import HeadForm, deepseek_form

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The dense part and the experts of a mixture."""

    dense: DenseConfig
    shape: MoEShape
    sparse_layers: frozenset[int]  # the other layers have a feed-forward block
    names: ExpertNames  # relative to a layer
    ignored_tensors: tuple[str, ...]  # prefixes of tensors that are ignored
    granite_layout: bool = False  # two tensors per layer, shared block apart: see `granite_moe`
    residual_scale: float = 1.0  # of these blocks' and attention's outputs; multiplied into matrices while loading

    @classmethod
    def from_hf(cls, config: Fields) -> MoEConfig:
        check_silu(config)
        family = MOE[config["model_type"]]
        config = family.rename(with_defaults(config, family.defaults))
        dense = family.dense(config)
        num_layers = dense.num_layers
        sparse = sparse_layers(config, num_layers)
        moe = cls(dense, family.shape(config), sparse, family.names, draft_layers(config, num_layers))
        if not family.granite_layout:
            return moe
        return replace(
            moe, granite_layout=True, dense=replace(dense, residual_scale=1.0), residual_scale=dense.residual_scale
        )


class MoEModel(DenseModel):
    """`DenseModel` with experts as feed-forward blocks."""

    def __init__(
        self,
        config: MoEConfig,
        build: Build,
    ):
        scale = scale_by(config.residual_scale)
        super().__init__(config.dense, build=build, feed_forward=_feed_forward(config, build))
        self._mixture = config
        self.activation_elements = max(self.activation_elements, 4 * config.dense.width + moe_activations(config.shape))
        self._ignored_prefixes = config.ignored_tensors
        if scale is not None:
            for layer in self.layers:
                assert isinstance(layer, DenseLayer)
                set_forms(layer.attention.out, (scale,))

    def ignored_prefixes(self) -> tuple[str, ...]:
        return self._ignored_prefixes

    def head_form(self) -> HeadForm | None:
        config = self._mixture
        dense, index = config.dense, config.dense.num_layers
        if not config.ignored_tensors or dense.norm.kind != "rms":
            return None  # such a checkpoint has no layers after the last
        more = replace(
            config,
            dense=replace(dense, ropes=(*dense.ropes, dense.ropes[-1]), windows=(*dense.windows, None)),
            sparse_layers=config.sparse_layers | {index},
        )
        return deepseek_form(
            f"{dense.names.layers}.{index}",
            dense.width,
            dense.norm.eps,
            lambda build: DenseLayer(index, 0, more.dense, build, _feed_forward(more, build)),
            replace(self.specs[0], window=None),
            self.ropes[self.layer_ropes[-1]],
            tied=dense.tied,
        )

    @staticmethod
    def read_config(config: Fields) -> MoEConfig:
        return MoEConfig.from_hf(config)


def _feed_forward(config: MoEConfig, build: Build) -> FeedForward:
    """Returns what builds a layer's experts."""
    scale = scale_by(config.residual_scale)

    def feed_forward(index: int, norm: Norm | None, join: ResidualJoin) -> nn.Module | None:
        if index not in config.sparse_layers:
            return None
        layer = f"{config.dense.names.layers}.{index}"
        names = config.names.below(layer)
        if config.granite_layout:
            return granite_mixture(layer, names, norm, config.shape, scale, build=build)
        return MoE(names, norm, config.shape, build=build, join=join)

    return feed_forward
