"""Mixture of experts in plain torch: the CPU path, and the oracle for `kernels.triton.experts`.

Tokens are sorted by expert, each used expert is applied to all of its tokens at once, and the results are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.activations import CURVES
from quire.kernels.expert_types import ExpertWeights, GatedActivation, Routing, plain_matrix
from quire.kernels.reference.small_ops import rms_norm


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
    """Norms the residual stream and routes its tokens. Returns the normed stream [tokens, width] (unchanged without
    `norm_weight`), and the chosen experts and weights of `route`. `router` is [logits, width]."""
    x = stream if norm_weight is None else rms_norm(stream, norm_weight, eps)
    return x, *route(router_logits(x, router, router_bias, routing), choice_bias, routing, expert_scale)


def router_logits(x: Tensor, router: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """Returns [tokens, logits], in float32 where the routing is exact."""
    if routing.exact and x.dtype != torch.float32:
        return functional.linear(x.float(), router.float(), None if bias is None else bias.float())
    return functional.linear(x, router, bias)


def route(
    logits: Tensor, bias: Tensor | None, routing: Routing, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses the top-k experts of each token from `logits` [tokens, logits]; bias and expert_scale are [experts].

    Returns expert numbers [tokens, num_sent] int64, best first, and their weights [tokens, num_sent] float32; shared
    experts come last."""
    logits, gate = logits.float().split((routing.num_experts, int(routing.shared_gated)), 1)
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    ranks = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        ranks = ranks.masked_fill(~_in_best_groups(ranks, routing), -torch.inf)
    chosen = ranks.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if routing.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if expert_scale is not None:
        weights = weights * expert_scale[chosen]
    weights = weights if routing.scale == 1.0 else weights * routing.scale
    if not routing.num_shared:
        return chosen, weights
    shared = torch.arange(routing.num_experts, routing.num_experts + routing.num_shared, device=chosen.device)
    gates = gate.sigmoid() if routing.shared_gated else torch.ones_like(weights[:, :1])
    sizes = (len(chosen), routing.num_shared)
    return torch.cat((chosen, shared.expand(sizes)), 1), torch.cat((weights, gates.expand(sizes)), 1)


def _in_best_groups(ranks: Tensor, routing: Routing) -> Tensor:
    """Returns a mask of the experts in each token's best groups, [tokens, experts] bool."""
    groups = ranks.view(len(ranks), routing.num_groups, -1)
    best = groups.topk(routing.group_members, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
    allowed = torch.zeros(groups.shape[:2], dtype=torch.bool, device=ranks.device).scatter_(1, best, True)
    return allowed.unsqueeze(-1).expand_as(groups).reshape(ranks.shape)


def run_experts(
    x: Tensor, experts: ExpertWeights, chosen: Tensor, weights: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Applies each token's chosen experts to x [tokens, width] and returns their weighted sum plus `residual`, [tokens,
    width]. `chosen` and `weights` are [tokens, top_k]."""
    top_k = chosen.shape[1]
    out = torch.zeros_like(x) if residual is None else residual.clone()
    order = chosen.flatten().argsort(stable=True)  # flat indices into `chosen`, sorted by expert
    counts = chosen.flatten().bincount(minlength=len(experts.gate_up)).tolist()
    tokens, shares = order // top_k, weights.flatten()[order].unsqueeze(1).to(x.dtype)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            mine = slice(start, start + count)
            y = _apply_expert(x[tokens[mine]], experts, expert)
            out.index_add_(0, tokens[mine], y.mul_(shares[mine]))
            start += count
    return out


def _apply_expert(x: Tensor, experts: ExpertWeights, expert: int) -> Tensor:
    lines = (experts.gate_up_bias, experts.down_bias, experts.gate_up_scale, experts.down_scale)
    gate_up_bias, down_bias, *scales = (None if line is None else line[expert] for line in lines)
    gate_up = plain_matrix(experts.gate_up[expert], scales[0], x.dtype)
    down = plain_matrix(experts.down[expert], scales[1], x.dtype)
    inner = gated(functional.linear(x, gate_up, gate_up_bias), experts.activation)
    return functional.linear(inner, down, down_bias)


def gated(gate_up: Tensor, activation: GatedActivation) -> Tensor:
    """Applies the activation: [n, 2 * inner], gates before ups -> [n, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return join_halves(gate, up, activation)


def join_halves(gate: Tensor, up: Tensor, activation: GatedActivation) -> Tensor:
    """Applies the activation to a gate and an up tensor of one shape, elementwise."""
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.curve == "gelu_tanh":
        gate = CURVES["gelu_tanh"](gate)
    elif activation.alpha == 1.0:
        gate = CURVES["silu"](gate)
    else:
        gate = gate * torch.sigmoid(activation.alpha * gate)
    return gate * (up + activation.shift if activation.shift else up)
