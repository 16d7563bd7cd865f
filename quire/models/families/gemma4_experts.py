"""Gemma 4's experts: next to a feed-forward block, on the same stream, with norms of their own.

`gemma4` uses `MLPAndExperts` as a layer's feed-forward block where config.json has `enable_moe_block`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.expert_types import Routing
from quire.layers.build import Build
from quire.layers.experts import Experts, MoEShape, expert_activation
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.weights import Part, ScaleTensor, Weight
from quire.models.fields import whole


def read_experts(config: Mapping[str, Any], width: int) -> MoEShape:
    routing = Routing(whole(config, "num_experts"), whole(config, "top_k_experts"))
    activation = expert_activation(config.get("hidden_activation") or "gelu_pytorch_tanh")
    return MoEShape(width, whole(config, "moe_intermediate_size"), routing, activation)


class MLPAndExperts(nn.Module):
    """Computes stream + norm(norm(mlp) + norm(experts)). The router and the experts norm the stream by different
    weights.
    """

    router: Tensor  # [experts, width]
    router_norm: Tensor  # [width]
    expert_scale: Tensor  # [experts], factor on an expert's weight

    def __init__(
        self,
        layer: str,
        mlp: GatedMLP,
        shape: MoEShape,
        norm: RMSNorm,
        after_experts: RMSNorm,
        last: RMSNorm,
        build: Build,
    ):
        """`mlp` norms its own output; `norm` and `after_experts` are around the experts, `last` is after both."""
        super().__init__()
        self.mlp = mlp
        self.norm = norm
        self.after_experts = after_experts
        self.last = last
        self.routing = shape.routing
        self.ops = build.ops
        num, width = shape.routing.num_experts, shape.width
        self.router = Weight.whole(f"{layer}.router.proj.weight", (num, width), build.dtype)
        # float32: the scale is no power of two, so a narrower dtype would round a second time.
        scale = Part(f"{layer}.router.scale", (width,), 0, width, form=ScaleTensor(width**-0.5))
        self.router_norm = Weight((width,), torch.float32, (scale,))
        self.expert_scale = Weight.whole(f"{layer}.router.per_expert_scale", (num,), torch.float32)
        names = (f"{layer}.experts.gate_up_proj", f"{layer}.experts.down_proj")
        self.experts = Experts.from_two(*names, shape, build)

    def forward(self, stream: Tensor) -> Tensor:
        """Adds the outputs of both to stream [tokens, width]."""
        _, chosen, shares = self.ops.norm_route(
            stream, self.router_norm, self.norm.eps, self.router, None, None, self.routing, self.expert_scale
        )
        routed = self.ops.run_experts(self.norm(stream), self.experts.weights(), chosen, shares)
        return self.last.add_to(stream, self.mlp(stream, self.after_experts(routed)), 1.0)
