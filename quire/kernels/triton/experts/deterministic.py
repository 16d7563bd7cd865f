"""Mixture of experts of the deterministic mode on CUDA: the router's product is `fixed_linear`, and tokens go through
the grouped kernels of `experts`, a single one as many.

The grouped kernels are batch-invariant: the weight is the left operand, every sum is one chain along the columns, and a
token's experts are added by rank. The number of rows per tile depends on the number of rows and changes no sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.expert_types import ExpertWeights, Routing
from quire.kernels.triton.experts import experts
from quire.kernels.triton.experts.route import route
from quire.kernels.triton.linear.deterministic import fixed_linear
from quire.kernels.triton.linear.norm import rms_norm


def norm_route(
    stream: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    router: Tensor,
    router_bias: Tensor | None,
    choice_bias: Tensor | None,
    routing: Routing,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `route.norm_route`; logits are always float32."""
    x = stream if norm_weight is None else rms_norm(stream, norm_weight, eps)
    if routing.exact and x.dtype != torch.float32:
        logits = fixed_linear(x.float(), router.float(), None if router_bias is None else router_bias.float())
    else:
        logits = fixed_linear(x, router, router_bias, out_dtype=torch.float32)
    return x, *route(logits, choice_bias, routing, expert_scale)


def run_experts(
    x: Tensor, weights: ExpertWeights, chosen: Tensor, shares: Tensor, residual: Tensor | None = None
) -> Tensor:
    """As `experts.run_experts`."""
    tuning = experts.tune(chosen.numel(), len(weights.gate_up))
    return experts.run_experts(x, weights, chosen, shares, residual, tuning)
