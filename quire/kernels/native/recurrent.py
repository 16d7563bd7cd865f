"""Recurrent layers on a CPU: rows of one token go through the native library in one call, rows that catch up through
the reference, by whose plan both go. `kernels.table` puts these into the library's row.

In torch a token of such a layer is some fifty small ops, which cost more than its bytes do.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels import reference_recurrent as reference
from quire.kernels.native.library import Columns, Native, RecurrentDesc, RowsDesc
from quire.kernels.recurrent import ConvShape, ConvWeights, DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.reference_recurrent import RecurrentPlan


class NativeRecurrent:
    def __init__(self, native: Native):
        self._library = native.library
        self._context = native.context

    def gated_delta_net(self, x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor,
                        plan: RecurrentPlan) -> Tensor:  # fmt: skip
        def step(plan: RecurrentPlan, out: Tensor) -> None:
            mixed, gate, beta, a = x.split((shape.channels, shape.values, shape.num_heads, shape.num_heads), dim=1)
            self._step(_delta_desc(weights, shape), mixed, gate, beta, a, shape, state, plan, out)

        def catch_up(rows: RecurrentPlan, tokens: slice) -> Tensor:
            return reference.gated_delta_net(x[tokens], weights, shape, state, rows)

        tensors = (weights.conv, weights.a_log, weights.dt_bias, weights.norm)
        return _run(step, catch_up, (x,), tensors, state, plan, shape.values)

    def channel_delta_net(self, x: Tensor, forget: Tensor, gate: Tensor, weights: DeltaWeights, shape: RecurrentShape,
                          state: Tensor, plan: RecurrentPlan) -> Tensor:  # fmt: skip
        def step(plan: RecurrentPlan, out: Tensor) -> None:
            mixed, beta = x.split((shape.channels, shape.num_heads), dim=1)
            desc = _delta_desc(weights, shape, by_channel=True)
            self._step(desc, mixed, gate, beta, forget, shape, state, plan, out)

        def catch_up(rows: RecurrentPlan, tokens: slice) -> Tensor:
            return reference.channel_delta_net(x[tokens], forget[tokens], gate[tokens], weights, shape, state, rows)

        tensors = (weights.conv, weights.a_log, weights.dt_bias, weights.norm)
        return _run(step, catch_up, (x, forget, gate), tensors, state, plan, shape.values)

    def mamba2(self, x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor,
               plan: RecurrentPlan) -> Tensor:  # fmt: skip
        def step(plan: RecurrentPlan, out: Tensor) -> None:
            gate, mixed, dt = x.split((shape.values, shape.channels, shape.num_heads), dim=1)
            desc = RecurrentDesc(
                *map(_place, (weights.conv, weights.conv_bias, weights.a_log, weights.dt_bias, weights.skip)),
                _place(weights.norm), *_sizes(shape), weights.norm_groups, weights.eps, weights.dt_low,
                weights.dt_high, 1.0, weights.gate_first, False,
            )  # fmt: skip
            self._step(desc, mixed, gate, None, dt, shape, state, plan, out)

        def catch_up(rows: RecurrentPlan, tokens: slice) -> Tensor:
            return reference.mamba2(x[tokens], weights, shape, state, rows)

        tensors = (weights.conv, weights.conv_bias, weights.a_log, weights.dt_bias, weights.skip, weights.norm)
        return _run(step, catch_up, (x,), tensors, state, plan, shape.values)

    def short_conv(self, x: Tensor, weights: ConvWeights, shape: ConvShape, state: Tensor,
                   plan: RecurrentPlan) -> Tensor:  # fmt: skip
        def step(plan: RecurrentPlan, out: Tensor) -> None:
            self._library.quire_short_conv(
                self._context, _place(weights.conv), _place(weights.bias), shape.channels, shape.conv_len,
                byref(_rows(state, plan)), byref(_columns(x)), out.data_ptr(),
            )  # fmt: skip

        def catch_up(rows: RecurrentPlan, tokens: slice) -> Tensor:
            return reference.short_conv(x[tokens], weights, shape, state, rows)

        return _run(step, catch_up, (x,), (weights.conv, weights.bias), state, plan, shape.channels)

    def _step(self, desc: RecurrentDesc, mixed: Tensor, gate: Tensor, beta: Tensor | None, decay: Tensor,
              shape: RecurrentShape, state: Tensor, plan: RecurrentPlan, out: Tensor) -> None:  # fmt: skip
        self._library.quire_recurrent(
            self._context, byref(desc), byref(_rows(state, plan)), byref(_columns(mixed)), byref(_columns(gate)),
            byref(_columns(beta)), byref(_columns(decay)), out.data_ptr(),
        )  # fmt: skip


def _run(step: Callable[[RecurrentPlan, Tensor], None], catch_up: Callable[[RecurrentPlan, slice], Tensor],
         inputs: tuple[Tensor, ...], weights: tuple[Tensor | None, ...], state: Tensor, plan: RecurrentPlan,
         num_outputs: int) -> Tensor:  # fmt: skip
    """Both kinds of rows. What the library does not take (see `_is_plain`) is the reference's as a whole."""
    num_singles = len(plan.slots) if plan.singles is None else len(plan.singles)
    if not num_singles or not _is_plain(inputs, weights, state):
        return catch_up(plan, slice(None))
    out = inputs[0].new_empty(len(inputs[0]), num_outputs)
    for row, first, count in plan.catch_ups:
        tokens = slice(first, first + count)
        alone = reference.plan_recurrent(plan.slots[row : row + 1], plan.positions[tokens], [count])
        out[tokens] = catch_up(alone, tokens)
    step(replace(plan, slots=plan.slots.contiguous(), positions=plan.positions.contiguous()), out)
    return out


def _is_plain(inputs: tuple[Tensor, ...], weights: tuple[Tensor | None, ...], state: Tensor) -> bool:
    """float32, tokens and slots in one piece each, weights dense."""
    rows = all(x.dtype == torch.float32 and x.stride(1) == 1 for x in (*inputs, state))
    return rows and all(w is None or (w.dtype == torch.float32 and w.is_contiguous()) for w in weights)


def _delta_desc(weights: DeltaWeights, shape: RecurrentShape, by_channel: bool = False) -> RecurrentDesc:
    return RecurrentDesc(
        _place(weights.conv), None, _place(weights.a_log), _place(weights.dt_bias), None, _place(weights.norm),
        *_sizes(shape), 1, weights.eps, 0.0, 0.0, shape.beta_top, False, by_channel,
    )  # fmt: skip


def _sizes(shape: RecurrentShape) -> tuple[int, ...]:
    return shape.num_groups, shape.num_heads, shape.key_dim, shape.value_dim, shape.conv_len


def _rows(state: Tensor, plan: RecurrentPlan) -> RowsDesc:
    """The plan's tensors are dense, and outlive the call."""
    num_rows = len(plan.slots) if plan.singles is None else len(plan.singles)
    return RowsDesc(
        state.data_ptr(), state.stride(0), plan.slots.data_ptr(), plan.positions.data_ptr(), _place(plan.singles),
        _place(plan.single_tokens), num_rows,
    )  # fmt: skip


def _columns(x: Tensor | None) -> Columns:
    return Columns(None, 0) if x is None else Columns(x.data_ptr(), x.stride(0))


def _place(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.data_ptr()
