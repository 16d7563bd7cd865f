"""A mixture of experts over packed matrices: what `Ops.run_experts` does where a layer's experts are kept in blocks.

Each expert is two products over the tokens that chose it; a token alone reads its own experts' blocks and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.experts import GatedActivation
from quire.kernels.native.matrix import PackedLinear
from quire.kernels.reference_experts import gated


@dataclass(frozen=True, slots=True)
class PackedExperts:
    gate_up: Sequence[PackedLinear]  # of each expert, gates above ups
    down: Sequence[PackedLinear]
    activation: GatedActivation


def run_packed_experts(x: Tensor, experts: PackedExperts, chosen: Tensor, weights: Tensor,
                       residual: Tensor | None = None) -> Tensor:  # fmt: skip
    """As `reference_experts.run_experts`."""
    top_k = chosen.shape[1]
    out = torch.zeros_like(x) if residual is None else residual.clone()
    order = chosen.flatten().argsort(stable=True)  # places of `chosen`, sorted by expert
    found, counts = chosen.flatten()[order].unique_consecutive(return_counts=True)
    tokens, shares = order // top_k, weights.flatten()[order].unsqueeze(1)
    start = 0
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        mine = slice(start, start + count)
        start += count
        inner = experts.gate_up[expert](x[tokens[mine]])
        if experts.activation.is_silu_mul:
            y = experts.down[expert](inner, silu_mul=True)
        else:
            y = experts.down[expert](gated(inner, experts.activation))
        out.index_add_(0, tokens[mine], y.mul_(shares[mine]))
    return out
