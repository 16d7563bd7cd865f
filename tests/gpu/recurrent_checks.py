"""Recurrent layers' Triton kernels against the exact recurrence in float64: mixed steps, over and over, from the state
that the steps before left. Run as `kernel_checks` are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels import reference_recurrent as reference
from quire.kernels.recurrent import DeltaWeights, MambaWeights, RecurrentShape
from tests.gpu.where import Where, close

# A chunk's products are rounded to the type they are computed in before the state sums them up.
BOUNDS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
STEPS = [[40, 1, 1, 7], [1, 1, 1, 1], [1, 90, 3, 1]]  # tokens per row
STEPS_SMALL = [[19, *[1] * 7], [1, 70, *[1] * 6]]  # eight rows: enough for small blocks


def weights_of(where: Where, shape: RecurrentShape, dtype: torch.dtype, delta: bool) -> DeltaWeights | MambaWeights:
    heads = shape.num_heads
    conv = where.normal(shape.channels, 1, shape.conv_len, dtype=dtype) * 0.5
    a_log, dt_bias = where.normal(heads) - 1.0, where.normal(heads)
    if delta:
        return DeltaWeights(conv, a_log, dt_bias, where.normal(shape.value_dim, dtype=dtype) + 1.0, 1e-6)
    return MambaWeights(conv, where.normal(shape.channels, dtype=dtype), a_log, dt_bias, where.normal(heads),
                        where.normal(shape.values, dtype=dtype) + 1.0, 1e-5, shape.num_groups, 0.01, 5.0)  # fmt: skip


def doubled(weights: Any) -> Any:
    """The same weights in float64, for the reference."""
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}
    return replace(weights, **{name: value.double() for name, value in tensors.items() if isinstance(value, Tensor)})


def check_recurrent(where: Where, shapes: list[RecurrentShape], delta: bool) -> None:
    from quire.kernels.triton import recurrent

    for dtype in where.dtypes:
        for shape in shapes:
            weights = weights_of(where, shape, dtype, delta)
            steps = STEPS if where.large else STEPS_SMALL
            num_rows = len(steps[0])
            slots = torch.randperm(num_rows + 2, device=where.device)[:num_rows]
            state = torch.zeros(num_rows + 2, shape.slot_elements, device=where.device)
            exact = state.clone().double()
            lens = [0] * num_rows
            width = shape.channels + shape.values + (2 if delta else 1) * shape.num_heads
            for counts in steps:
                ends = [n + c for n, c in zip(lens, counts, strict=True)]
                spans = [torch.arange(n, end, device=where.device) for n, end in zip(lens, ends, strict=True)]
                positions = torch.cat(spans)
                x = where.normal(sum(counts), width + 5, dtype=dtype)[:, :width]
                where.settle()
                where.poison()
                op, plain = ((recurrent.gated_delta_net, reference.gated_delta_net) if delta else
                             (recurrent.mamba2, reference.mamba2))  # fmt: skip
                out = op(x, weights, shape, state, recurrent.plan_recurrent(slots, positions, counts))
                plan = reference.plan_recurrent(slots, positions, counts)
                expected = plain(x.double(), doubled(weights), shape, exact, plan)
                name = f"{'delta' if delta else 'mamba'} {shape.num_heads}/{shape.num_groups} heads, {counts}"
                close(out, expected, dtype, name, BOUNDS[dtype])
                close(shape.rings(state), shape.rings(exact), dtype, f"{name}: rings", 1e-6)
                close(shape.matrices(state), shape.matrices(exact), dtype, f"{name}: state", BOUNDS[dtype])
                lens = ends


def check_gated_delta_net(where: Where) -> None:
    large = [RecurrentShape(16, 32, 128, 128, 4), RecurrentShape(2, 4, 64, 128, 4)]
    shapes = large if where.large else [RecurrentShape(1, 2, 16, 40, 4)]
    check_recurrent(where, shapes, True)


def check_mamba2(where: Where) -> None:
    large = [RecurrentShape(8, 128, 128, 64, 4), RecurrentShape(1, 24, 256, 64, 4)]
    shapes = large if where.large else [RecurrentShape(1, 2, 24, 16, 3)]
    check_recurrent(where, shapes, False)


CHECKS: dict[str, Callable[[Where], None]] = {
    "gated_delta_net": check_gated_delta_net,
    "mamba2": check_mamba2,
}
