"""Deterministic recurrent layers for CPUs: every token is computed separately, in prefill as in decode.

A chunked scan sums in another order than single steps, so there is none here; and because libraries choose loops by
tensor shape, rows are not batched either. `docs/reliability.md` has the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.recurrent_types import ConvShape, ConvWeights, DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.reference import recurrent as reference_recurrent
from quire.kernels.reference.recurrent import RecurrentPlan

ALIGNMENT = 64  # bytes; slots at multiples of it are aligned alike


@dataclass(frozen=True, slots=True)
class TokenPlans:
    """The plan that all recurrent layers share in one step."""

    slots: list[int]  # per row
    tokens: list[list[RecurrentPlan]]  # per row and token: the plan of a step with that token only


def plan_recurrent(slots: Tensor, positions: Tensor, counts: list[int]) -> TokenPlans:
    """Plans every token as a step of its own."""
    here = torch.zeros(1, dtype=torch.int64)
    plans = iter([RecurrentPlan(1, here, position, None, None, ()) for position in positions.split(1)])
    return TokenPlans(slots.tolist(), [[next(plans) for _ in range(count)] for count in counts])


def gated_delta_net(x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, plan: TokenPlans) -> Tensor:
    """The reference's `gated_delta_net`, token by token."""

    def layer(x: Tensor, state: Tensor, alone: RecurrentPlan) -> Tensor:
        return reference_recurrent.gated_delta_net(x, weights, shape, state, alone)

    return _by_token(layer, (x,), shape.values, state, plan)


def channel_delta_net(
    x: Tensor,
    forget: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    plan: TokenPlans,
) -> Tensor:
    """The reference's `channel_delta_net`, token by token."""

    def layer(x: Tensor, forget: Tensor, gate: Tensor, state: Tensor, alone: RecurrentPlan) -> Tensor:
        return reference_recurrent.channel_delta_net(x, forget, gate, weights, shape, state, alone)

    return _by_token(layer, (x, forget, gate), shape.values, state, plan)


def mamba2(x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor, plan: TokenPlans) -> Tensor:
    """The reference's `mamba2`, token by token."""

    def layer(x: Tensor, state: Tensor, alone: RecurrentPlan) -> Tensor:
        return reference_recurrent.mamba2(x, weights, shape, state, alone)

    return _by_token(layer, (x,), shape.values, state, plan)


def short_conv(x: Tensor, weights: ConvWeights, shape: ConvShape, state: Tensor, plan: TokenPlans) -> Tensor:
    """The reference's `short_conv`, token by token."""

    def layer(x: Tensor, state: Tensor, alone: RecurrentPlan) -> Tensor:
        return reference_recurrent.short_conv(x, weights, shape, state, alone)

    return _by_token(layer, (x,), shape.channels, state, plan)


def _by_token(
    layer: Callable[..., Tensor], inputs: tuple[Tensor, ...], num_outputs: int, state: Tensor, plan: TokenPlans
) -> Tensor:
    """Calls `layer` with one token of all `inputs` [tokens, ...], its state and its plan at a time. Tokens are copied,
    and so are states whose slots are aligned differently, because results must not depend on memory alignment."""
    first, token = inputs[0], 0
    out = first.new_empty(len(first), num_outputs)
    begin_alike = state.stride(0) * state.element_size() % ALIGNMENT == 0
    for slot, plans in zip(plan.slots, plan.tokens, strict=True):
        lying = state[slot : slot + 1]
        own = lying if begin_alike else lying.clone()
        for alone in plans:
            here = slice(token, token + 1)
            out[here] = layer(*(each[here].clone() for each in inputs), own, alone)
            token += 1
        if own is not lying:
            lying.copy_(own)
    return out
