"""Mixtures and recurrent layers in the deterministic mode: right, and a token's bits are the same in whatever company.
Run as `kernel_checks` are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from quire.kernels.expert_types import ExpertWeights, GatedActivation, Routing
from quire.kernels.recurrent_types import RecurrentShape
from quire.kernels.reference import experts as reference_experts
from quire.kernels.reference import recurrent as reference_recurrent
from quire.kernels.validation.recurrent_trials import of_one_tensor
from tests.gpu.fixed_checks import equal
from tests.gpu.recurrent_checks import BOUNDS, doubled, weights_of
from tests.gpu.where import Where, close

COUNTS = (1, 2, 7, 16, 17, 33, 64, 100, 300, 1000)  # tokens: every size of tile


def check_fixed_experts(where: Where) -> None:
    """The shapes of Qwen3-30B-A3B and gpt-oss, the latter with fewer experts, and Gemma 4's kind of experts."""
    from quire.kernels.triton.experts import deterministic as fixed_experts

    cases = [(128, 8, 2048, 768, None), (32, 4, 1440, 1440, GatedActivation(1.702, 1.0, 7.0)),
             (32, 8, 1408, 704, GatedActivation(curve="gelu_tanh"))]  # fmt: skip
    for dtype in where.dtypes:
        for num, top_k, width, inner, activation in cases if where.large else [(6, 2, 40, 24, None)]:
            weights, routing = _experts(where, dtype, num, width, inner, activation), Routing(num, top_k)
            norm, router = where.normal(width, dtype=dtype), where.normal(num, width, dtype=dtype) * width**-0.5
            stream = where.normal(2100 if where.large else 8, width, dtype=dtype)
            where.settle()

            def run(rows: slice, stream: Any = stream, parts: Any = (norm, router, routing, weights)) -> Any:
                norm, router, routing, weights = parts
                where.poison()
                x, chosen, shares = fixed_experts.norm_route(stream[rows], norm, 1e-6, router, None, None, routing)
                return x, chosen, shares, fixed_experts.run_experts(x, weights, chosen, shares, stream[rows])

            name = f"{num} experts of {width} x {inner} in {dtype}"
            x, chosen, shares, whole = run(slice(None))
            logits = x.double() @ router.double().T
            close(shares, reference_experts.route(logits, None, routing)[1], dtype, f"{name}: weights")
            few = slice(0, 40)
            wide = ExpertWeights(weights.gate_up.double(), weights.down.double(), *(
                None if bias is None else bias.double() for bias in (weights.gate_up_bias, weights.down_bias)
            ), weights.activation)  # fmt: skip
            expected = reference_experts.run_experts(x[few].double(), wide, chosen[few].long(), shares[few].double(),
                                                     stream[few].double())  # fmt: skip
            close(whole[few], expected, dtype, name)
            for count in COUNTS if where.large else ():  # the interpreter's products go by the shape of a tile
                first = where.random.randrange(len(stream) - count)
                rows = slice(first, first + count)
                for got, want in zip(run(rows), (x, chosen, shares, whole), strict=True):
                    equal(got, want[rows], f"{name}, {count} tokens")


def _experts(where: Where, dtype: torch.dtype, num: int, width: int, inner: int,
             activation: GatedActivation | None) -> ExpertWeights:  # fmt: skip
    gate_up = where.normal(num, 2 * inner, width, dtype=dtype) * width**-0.5
    down = where.normal(num, width, inner, dtype=dtype) * inner**-0.5
    if activation is None:
        return ExpertWeights(gate_up, down)
    biases = where.normal(num, 2 * inner, dtype=dtype), where.normal(num, width, dtype=dtype)
    return ExpertWeights(gate_up, down, *biases, activation)


def check_fixed_recurrent(where: Where) -> None:
    """One prompt whole, in chunks and token by token, beside others and alone."""
    from quire.kernels.triton.recurrent import deterministic as fixed_recurrent

    large = [(RecurrentShape(16, 32, 128, 128, 4), True), (RecurrentShape(8, 128, 128, 64, 4), False),
             (RecurrentShape(30, 30, 96, 192, 4, beta_top=2.0), True)]  # fmt: skip
    small = [(RecurrentShape(1, 2, 16, 40, 4, beta_top=2.0), True), (RecurrentShape(1, 2, 24, 16, 3), False)]
    dtypes, cases = (where.dtypes, large) if where.large else (where.dtypes[:1], small)
    for dtype, (shape, delta) in product(dtypes, cases):
        op: Any = fixed_recurrent.gated_delta_net if delta else fixed_recurrent.mamba2
        plain: Any = reference_recurrent.gated_delta_net if delta else reference_recurrent.mamba2
        width = shape.channels + shape.values + (2 if delta else 1) * shape.num_heads
        name = f"{'delta' if delta else 'mamba'}, {shape.num_heads} heads in {dtype}"
        _check_bits(where, op, plain, weights_of(where, shape, dtype, delta), shape, width, dtype, name)


def check_fixed_channel_delta(where: Where) -> None:
    """Likewise."""
    from quire.kernels.triton.recurrent import deterministic as fixed_recurrent

    op, plain = (of_one_tensor(row.channel_delta_net) for row in (fixed_recurrent, reference_recurrent))
    shape = RecurrentShape(32, 32, 128, 128, 4) if where.large else RecurrentShape(2, 2, 12, 20, 3)
    for dtype in where.dtypes if where.large else where.dtypes[:1]:
        weights = replace(weights_of(where, shape, dtype, True), dt_bias=where.normal(shape.keys))
        width = shape.channels + shape.num_heads + shape.keys + shape.values
        _check_bits(where, op, plain, weights, shape, width, dtype, f"channels' delta in {dtype}")


def _check_bits(where: Where, op: Any, plain: Any, weights: Any, shape: RecurrentShape, width: int, dtype: torch.dtype,
                name: str) -> None:  # fmt: skip
    """`width`: of what the op is given."""
    from quire.kernels.triton.recurrent import deterministic as fixed_recurrent

    total, sizes = (90, (1, 7, 64)) if where.large else (5, (1, 3))
    x = where.normal(2 * total, width, dtype=dtype)  # the prompt, then somebody else's
    where.settle()
    state = torch.zeros(4, shape.slot_elements, device=where.device)
    slots, positions = torch.tensor([2, 1], device=where.device), torch.arange(total, device=where.device)
    where.poison()
    plan = fixed_recurrent.plan_recurrent(slots, positions.repeat(2), [total, total])
    whole = op(x, weights, shape, state, plan)
    exact = torch.zeros(4, shape.slot_elements, device=where.device, dtype=torch.float64)
    plan = reference_recurrent.plan_recurrent(slots, positions.repeat(2), [total, total])
    expected = plain(x.double(), doubled(weights), shape, exact, plan)
    close(whole, expected, dtype, name, BOUNDS[dtype])
    for size in sizes:
        again = torch.zeros_like(state)
        for first in range(0, total, size):
            count = min(size, total - first)
            others = slice(total + first, total + first + 1)  # a single token beside it, of no matter
            part = torch.cat((x[first : first + count], x[others]))
            places = torch.cat((positions[first : first + count], positions[first : first + 1]))
            plan = fixed_recurrent.plan_recurrent(slots, places, [count, 1])
            got = op(part, weights, shape, again, plan)[:count]
            equal(got, whole[first : first + count], f"{name}, {size} at a time")
        equal(again[2], state[2], f"{name}, {size} at a time: state")


CHECKS: dict[str, Callable[[Where], None]] = {
    "fixed_experts": check_fixed_experts,
    "fixed_recurrent": check_fixed_recurrent,
    "fixed_channel_delta": check_fixed_channel_delta,
}
