"""A mixture of experts for the deterministic mode on CUDA: the router's product is `fixed_linear`'s, and tokens go
through their experts by the grouped kernels of `experts`, one alone as many.

Those are of the kind that is wanted: weights on the left, every sum one chain along the columns, a token's experts
added up by rank. How many rows share a tile follows from how many there are, and changes no sum.
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
