"""Trials of the router and the experts on a mixture's own shape; see `trials`.

Few tokens go through few experts, the last one included, to keep the reference's work small. All experts of a layer are
allocated as in the model, but only the chosen ones are initialized.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels.expert_types import ExpertWeights, GatedActivation, Routing, quantize_matrix
from quire.kernels.table import REFERENCE, Ops
from quire.kernels.validation.trials import (
    FEW_TOKENS,
    FP8_TOLERANCE,
    TOLERANCE,
    KernelTrial,
    compare,
    finish_writes,
    normal,
    reference_for,
    reference_route,
)


@dataclass(frozen=True, slots=True)
class ExpertsTrialShape:
    """The properties of a mixture that decide which kernels are compiled for it."""

    routing: Routing
    stream_width: int  # input features of the router
    width: int  # input features of an expert
    inner_width: int
    activation: GatedActivation
    dtype: torch.dtype
    norm_dtype: torch.dtype | None = None  # dtype of the weight of the norm fused with the router; None: no norm
    router_bias: bool = False
    choice_bias: bool = False
    gate_up_bias: bool = False
    down_bias: bool = False
    residual: bool = True  # whether the experts' sum is added to a residual
    expert_scale: bool = False  # whether each expert's weight has a scale
    scaled: bool = False  # whether experts are FP8 with scales


def list_expert_trials(shape: ExpertsTrialShape, device: torch.device) -> list[KernelTrial]:
    route = reference_for(norm_route=reference_route, captured=True)
    return [
        KernelTrial("router", lambda ops: try_router(ops, shape, device), route),
        KernelTrial(
            "FP8 experts" if shape.scaled else "experts",
            lambda ops: try_experts(ops, shape, device),
            None if shape.scaled else reference_for("run_experts"),
        ),
    ]


def try_router(ops: Ops, shape: ExpertsTrialShape, device: torch.device) -> None:
    """Compares the op's routing with the reference; raises if they disagree.

    The kernel may compute logits from the stream in float32, or from the rounded norm in either dtype, and near ties
    fall differently in each. A token's routing is right if it agrees with one of the three."""
    routing, width, dtype = shape.routing, shape.stream_width, shape.dtype
    router = normal(device, dtype, routing.num_logits, width) * width**-0.5
    stream = normal(device, dtype, FEW_TOKENS, width)
    norm = None if shape.norm_dtype is None else normal(device, shape.norm_dtype, width).abs_()
    router_bias = normal(device, dtype, routing.num_experts) if shape.router_bias else None
    choice_bias = normal(device, torch.float32, routing.num_experts) * 0.1 if shape.choice_bias else None
    expert_scale = normal(device, torch.float32, routing.num_experts) if shape.expert_scale else None
    finish_writes(device)
    weights: list[Any] = [router, router_bias, choice_bias, routing, expert_scale]
    x, chosen, shares = ops.norm_route(stream, norm, 1e-6, *weights)
    if x.is_meta:  # a dry run, see `compare`
        return
    num_there = routing.num_experts + routing.num_shared
    if not bool(((chosen >= 0) & (chosen < num_there)).all()):
        raise ArithmeticError("it routes tokens to experts that do not exist")
    got = _by_expert(chosen, shares, num_there)
    exact = [each.float() if isinstance(each, Tensor) else each for each in weights]
    true_x, *best = REFERENCE.norm_route(stream.float(), None if norm is None else norm.float(), 1e-6, *exact)
    compare(x, true_x, dtype)
    right = torch.zeros(FEW_TOKENS, dtype=torch.bool, device=device)
    of_rounded = (REFERENCE.norm_route(x.to(each[0].dtype), None, 0.0, *each)[1:] for each in (exact, weights))
    for choice in (best, *of_rounded):
        true = _by_expert(choice[0], choice[1], num_there)
        right |= (got - true).norm(dim=1) <= TOLERANCE[dtype] * true.norm(dim=1)
    if 4 * int(right.sum()) < 3 * FEW_TOKENS:
        raise ArithmeticError(f"it routes {int((~right).sum())} of {FEW_TOKENS} tokens to wrong experts")


def _by_expert(chosen: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """Scatters the weights of the chosen experts to [tokens, experts]."""
    shares = torch.zeros(len(chosen), num_experts, device=chosen.device)
    return shares.scatter_(1, chosen.long(), weights.float())


def try_experts(ops: Ops, shape: ExpertsTrialShape, device: torch.device) -> None:
    """Compares many tokens, two that share an expert, and one token with the reference; each has kernels of its own.
    Raises if they disagree."""
    routing, dtype = shape.routing, shape.dtype
    filled, shared = _spread(routing), list(range(routing.num_experts, routing.num_experts + routing.num_shared))
    experts = _make_experts(shape, filled + shared, device)
    there, always = (torch.tensor(which, dtype=torch.int64, device=device) for which in (filled, shared))
    for num_tokens in (FEW_TOKENS, 2, 1):
        preference = torch.rand(num_tokens, len(there), device=device)
        preference[:2, -1] = -1.0  # sends both to the last expert
        chosen = there[preference.argsort(1)[:, : routing.top_k]]
        chosen = torch.cat((chosen, always.expand(num_tokens, -1)), 1).int()
        weights = torch.rand(num_tokens, routing.num_sent, device=device)
        weights[:2, 0] = 2.0  # gives it enough weight for an error to show
        x = normal(device, dtype, num_tokens, shape.width)
        residual = normal(device, dtype, num_tokens, shape.width) if shape.residual else None
        stream = None if residual is None else residual.clone()  # the op may overwrite `residual`
        finish_writes(device)
        got = ops.run_experts(x, experts, chosen, weights, residual)
        limit = FP8_TOLERANCE if shape.scaled else None  # for many tokens the activations are rounded to FP8, too
        compare(got, partial(REFERENCE.run_experts, x, experts, chosen, weights, stream), dtype, limit)


def _spread(routing: Routing) -> list[int]:
    """Returns the numbers of 2 * top_k experts, spread from the first to the last."""
    count = min(2 * routing.top_k, routing.num_experts)
    return [number * (routing.num_experts - 1) // max(count - 1, 1) for number in range(count)]


def _make_experts(shape: ExpertsTrialShape, filled: list[int], device: torch.device) -> ExpertWeights:
    num = shape.routing.num_experts + shape.routing.num_shared
    inner, width, dtype = shape.inner_width, shape.width, shape.dtype

    def make(*size: int, scale: float = 1.0) -> Tensor:
        """Returns a tensor [experts, ...] in which only the filled experts are initialized."""
        made = torch.empty(num, *size, dtype=dtype, device=device)
        for expert in filled:
            made[expert].normal_(0.0, scale)
        return made

    def scale(plain: Tensor) -> tuple[Tensor, Tensor | None]:
        if not shape.scaled:
            return plain, None
        scaled = torch.empty(plain.shape, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(plain.shape[:2], dtype=torch.float32, device=device)
        for expert in filled:  # rows of different magnitude, so that a wrong row's scale would show
            sizes = torch.randint(-1, 2, (plain.shape[1], 1), device=device)
            scaled[expert], scales[expert] = quantize_matrix(plain[expert] * 2.0**sizes)
        return scaled, scales

    gate_up, gate_up_scale = scale(make(2 * inner, width, scale=width**-0.5))
    down, down_scale = scale(make(width, inner, scale=inner**-0.5))
    return ExpertWeights(
        gate_up,
        down,
        make(2 * inner) if shape.gate_up_bias else None,
        make(width) if shape.down_bias else None,
        shape.activation,
        gate_up_scale,
        down_scale,
    )
