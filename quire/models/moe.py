"""Decoders with ordinary attention and a mixture of experts in most layers: Qwen2-MoE, Qwen3-MoE, Mixtral, and kin.

Everything but the feed-forward blocks is `DenseModel`'s. The registry names `MoEModel`; a family is a line in
`_DENSE_KIND` (whose attention it has) and in `_shape` (how its experts are routed).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.kernels.experts import Routing
from quire.kernels.table import Ops
from quire.layers.moe import ExpertNames, MoE, MoEShape, moe_activations
from quire.layers.norm import Norm
from quire.layers.quant import Scheme
from quire.models.dense import DenseModel
from quire.models.dense_config import DenseConfig
from quire.models.dense_families import read_dense
from quire.models.fields import flag, whole
from quire.types import QuireError

_DENSE_KIND = {"mixtral": "mistral", "qwen2_moe": "qwen2", "qwen3_moe": "qwen3"}


@dataclass(frozen=True, slots=True)
class MoEConfig:
    dense: DenseConfig
    shape: MoEShape
    sparse_layers: frozenset[int]  # the others keep their feed-forward block
    names: ExpertNames  # relative to a layer

    @property
    def head_dim(self) -> int:
        return self.dense.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MoEConfig:
        kind = config["model_type"]
        dense = read_dense({**_dense_fields(config), "model_type": _DENSE_KIND[kind]})
        shape = _shape(config, kind)
        names = ExpertNames("mlp")
        if kind == "mixtral":
            names = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
        return cls(dense, shape, _sparse_layers(config, dense.num_layers), names)


class MoEModel(DenseModel):
    def __init__(self, config: MoEConfig, *, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device,
                 page_tokens: int, ops: Ops, scheme: Scheme):  # fmt: skip
        def feed_forward(index: int, norm: Norm | None) -> nn.Module | None:
            if index not in config.sparse_layers:
                return None
            names = config.names.below(f"model.layers.{index}")
            return MoE(names, norm, config.shape, dtype=dtype, ops=ops, scheme=scheme)

        super().__init__(
            config.dense, dtype=dtype, cache_dtype=cache_dtype, device=device, page_tokens=page_tokens, ops=ops,
            scheme=scheme, feed_forward=feed_forward,
        )  # fmt: skip
        self.activation_elements = max(self.activation_elements, 4 * config.dense.width + moe_activations(config.shape))

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> MoEConfig:
        return MoEConfig.from_hf(config)


def _dense_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `DenseConfig` reads, where these families say it otherwise."""
    fields = dict(config)
    if config["model_type"] == "mixtral":
        fields.setdefault("sliding_window", None)
    if config["model_type"] == "qwen2_moe" and not config.get("use_sliding_window"):
        fields["sliding_window"] = None  # written as 0
    return fields


def _shape(config: Mapping[str, Any], kind: str) -> MoEShape:
    width = whole(config, "hidden_size")
    num_experts = whole(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    top_k = whole(config, "num_experts_per_tok")
    match kind:
        case "mixtral":
            return MoEShape(width, whole(config, "intermediate_size"), Routing(num_experts, top_k))
        case "qwen3_moe" | "qwen2_moe":
            routing = Routing(num_experts, top_k, normalise=flag(config, "norm_topk_prob", False))
            inner = whole(config, "moe_intermediate_size")
            if kind == "qwen3_moe":
                return MoEShape(width, inner, routing)
            shared = whole(config, "shared_expert_intermediate_size")
            return MoEShape(width, inner, routing, shared_width=shared, shared_gated=True)
    raise AssertionError(kind)


def _sparse_layers(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer, except those named in `mlp_only_layers`."""
    step = whole(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not all(isinstance(index, int) and 0 <= index < num_layers for index in dense):
        what = f"mlp_only_layers={dense!r} must list layers below {num_layers}."
        raise QuireError("bad_config", what, "Check config.json.")
    return frozenset(index for index in range(num_layers) if (index + 1) % step == 0 and index not in dense)
