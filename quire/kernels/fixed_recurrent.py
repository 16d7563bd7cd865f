"""Recurrent layers for the deterministic mode on a CPU: every token by itself, in a prompt as in a decode.

A scan over chunks takes its sums in another order than single steps do, so there is none here; and because libraries go
by the shape of what they are given, not even rows are taken together. `docs/reliability.md` has the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import reference_recurrent
from quire.kernels.recurrent import DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.reference_recurrent import RecurrentPlan


@dataclass(frozen=True, slots=True)
class TokenPlans:
    """What all recurrent layers share in one step."""

    tokens: list[RecurrentPlan]  # of each token in turn, as if it were the step
    slots: list[int]  # of each token in turn


def plan_recurrent(slots: Tensor, positions: Tensor, counts: list[int]) -> TokenPlans:
    """As the reference."""
    own = [slot for slot, count in zip(slots.tolist(), counts, strict=True) for _ in range(count)]
    here = torch.zeros(1, dtype=torch.int64)
    return TokenPlans([RecurrentPlan(1, here, positions[t : t + 1], None, None, ()) for t in range(len(own))], own)


def gated_delta_net(x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor,
                    plan: TokenPlans) -> Tensor:  # fmt: skip
    """As the reference."""
    return _by_token(lambda *token: reference_recurrent.gated_delta_net(token[0], weights, shape, *token[1:]), x, shape,
                     state, plan)  # fmt: skip


def mamba2(x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor, plan: TokenPlans) -> Tensor:
    """As the reference."""
    return _by_token(lambda *token: reference_recurrent.mamba2(token[0], weights, shape, *token[1:]), x, shape, state,
                     plan)  # fmt: skip


def _by_token(layer: Callable[[Tensor, Tensor, RecurrentPlan], Tensor], x: Tensor, shape: RecurrentShape, state: Tensor,
              plan: TokenPlans) -> Tensor:  # fmt: skip
    """Token and state are copied to where nothing else lies: where in memory they begin must not matter, either."""
    out = x.new_empty(len(x), shape.values)
    for token, (slot, alone) in enumerate(zip(plan.slots, plan.tokens, strict=True)):
        own = state[slot : slot + 1].clone()
        out[token : token + 1] = layer(x[token : token + 1].clone(), own, alone)
        state[slot] = own[0]
    return out
