"""Deterministic mixture of experts for CPUs: router and experts run in tiles, and a token's experts are summed in the
order of their rank, independent of other tokens. Both deterministic CPU tables of `kernels.table` use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.deterministic.dense import elementwise, in_tiles, rms_norm
from quire.kernels.expert_types import ExpertWeights, GatedActivation, Routing
from quire.kernels.reference.experts import join_halves, route, router_logits

if TYPE_CHECKING:
    from quire.kernels.native.experts import PackedExperts


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
    """The reference's `norm_route` in tiles."""
    x = stream if norm_weight is None else rms_norm(stream, norm_weight, eps)

    def choose(tile: Tensor) -> Tensor:
        logits = router_logits(tile, router, router_bias, routing)
        chosen, weights = route(logits, choice_bias, routing, expert_scale)
        return torch.stack((chosen.double(), weights.double()), 1)

    chosen, weights = in_tiles(choose, x).unbind(1)
    return x, chosen.long(), weights.float()


def run_experts(
    x: Tensor, experts: ExpertWeights | PackedExperts, chosen: Tensor, weights: Tensor, residual: Tensor | None = None
) -> Tensor:
    """The reference's `run_experts`, in tiles and summed in rank order."""
    if not isinstance(experts, ExpertWeights):  # quantized blocks: the native call computes each token separately
        from quire.kernels.native.experts import run_packed_experts

        return run_packed_experts(x, experts, chosen, weights, residual)
    num_tokens, top_k = chosen.shape
    apply = _in_tensors(experts)
    parts = x.new_empty(num_tokens * top_k, x.shape[1])
    order = chosen.flatten().argsort(stable=True)  # flat indices into `chosen`, sorted by expert
    found, counts = chosen.flatten()[order].unique_consecutive(return_counts=True)
    for expert, pairs in zip(found.tolist(), order.split(counts.tolist()), strict=True):
        parts[pairs] = apply(expert, x[pairs // top_k])
    parts = parts.view(num_tokens, top_k, -1).mul_(weights.unsqueeze(2))
    out = torch.zeros_like(x) if residual is None else residual.clone()
    for choice in range(top_k):
        out.add_(parts[:, choice])
    return out


def _in_tensors(experts: ExpertWeights) -> Callable[[int, Tensor], Tensor]:
    def apply(expert: int, x: Tensor) -> Tensor:
        first, second = (None if bias is None else bias[expert] for bias in (experts.gate_up_bias, experts.down_bias))

        def both(tile: Tensor) -> Tensor:
            inner = _gated(functional.linear(tile, experts.gate_up[expert], first), experts.activation)
            return functional.linear(inner, experts.down[expert], second)

        return in_tiles(both, x)

    return apply


def _gated(gate_up: Tensor, activation: GatedActivation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return elementwise(lambda gate, up: join_halves(gate, up, activation), gate, up)
