"""Recurrent layers on a CPU: one call of the native library for all rows of a step, token by token.

In torch a token of such a layer takes about fifty small ops, which cost more than reading its state, and a chunked scan
has to build its matrices first. Inputs that the library does not support (see `_is_plain`) go to torch: to the
reference, or to the deterministic mode's ops. The library's results are deterministic: a token's bits are the same in
prefill, in decode and in any batch.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.kernels.native.library import Native, ProjectionColumns, RecurrentDesc, RowsDesc
from quire.kernels.recurrent_types import ConvShape, ConvWeights, DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.reference import recurrent as reference_recurrent


@dataclass(slots=True)
class NativeRecurrentPlan:
    """The plan that all recurrent layers share in one step; keeps the tensors alive that descriptors point to."""

    slots: Tensor  # [rows] int64, contiguous like the others
    positions: Tensor  # [tokens] int64
    starts: Tensor | None  # [2, rows] int64: first tokens, then counts; None: each row has one token
    counts: list[int]
    in_torch: Any = None  # plan of the torch fallback, made on first use


class NativeRecurrent:
    """The recurrent ops of the table. `torch_ops` is the module with the same functions in torch, as fallback."""

    def __init__(self, native: Native, torch_ops: ModuleType = reference_recurrent):
        self._library = native.library
        self._context = native.context
        self._torch_ops: Any = torch_ops

    @staticmethod
    def plan_recurrent(slots: Tensor, positions: Tensor, counts: list[int]) -> NativeRecurrentPlan:
        """Plans a step; the arguments are those of `reference.recurrent.plan_recurrent`."""
        assert slots.dtype == positions.dtype == torch.int64 and sum(counts) == len(positions)
        starts = None
        if any(count != 1 for count in counts):
            starts = torch.tensor([[0, *accumulate(counts[:-1])], counts], dtype=torch.int64)
        return NativeRecurrentPlan(slots.contiguous(), positions.contiguous(), starts, counts)

    def gated_delta_net(
        self, x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, plan: NativeRecurrentPlan
    ) -> Tensor:
        if not _is_plain(weights, x, state):
            return self._torch_ops.gated_delta_net(x, weights, shape, state, self._plan_in_torch(plan))
        mixed, gate, beta, a = x.split((shape.channels, shape.values, shape.num_heads, shape.num_heads), dim=1)
        return self._run(_delta_desc(weights, shape), mixed, gate, beta, a, shape, state, plan)

    def channel_delta_net(
        self,
        x: Tensor,
        forget: Tensor,
        gate: Tensor,
        weights: DeltaWeights,
        shape: RecurrentShape,
        state: Tensor,
        plan: NativeRecurrentPlan,
    ) -> Tensor:
        if not _is_plain(weights, x, forget, gate, state):
            in_torch = self._plan_in_torch(plan)
            return self._torch_ops.channel_delta_net(x, forget, gate, weights, shape, state, in_torch)
        mixed, beta = x.split((shape.channels, shape.num_heads), dim=1)
        return self._run(_delta_desc(weights, shape, by_channel=True), mixed, gate, beta, forget, shape, state, plan)

    def mamba2(
        self, x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor, plan: NativeRecurrentPlan
    ) -> Tensor:
        if not _is_plain(weights, x, state):
            return self._torch_ops.mamba2(x, weights, shape, state, self._plan_in_torch(plan))
        gate, mixed, dt = x.split((shape.values, shape.channels, shape.num_heads), dim=1)
        desc = RecurrentDesc(
            *map(_address, (weights.conv, weights.conv_bias, weights.a_log, weights.dt_bias, weights.skip)),
            _address(weights.norm),
            *_sizes(shape),
            weights.norm_groups,
            weights.eps,
            weights.dt_low,
            weights.dt_high,
            1.0,
            weights.gate_first,
            False,
        )
        return self._run(desc, mixed, gate, None, dt, shape, state, plan)

    def short_conv(
        self, x: Tensor, weights: ConvWeights, shape: ConvShape, state: Tensor, plan: NativeRecurrentPlan
    ) -> Tensor:
        if not _is_plain(weights, x, state):
            return self._torch_ops.short_conv(x, weights, shape, state, self._plan_in_torch(plan))
        assert x.shape == (len(plan.positions), 3 * shape.channels)
        out = x.new_empty(len(x), shape.channels)
        self._library.quire_short_conv(
            self._context,
            _address(weights.conv),
            _address(weights.bias),
            shape.channels,
            shape.conv_len,
            byref(_rows(state, plan)),
            byref(_projection_columns(x)),
            out.data_ptr(),
        )
        return out

    def _plan_in_torch(self, plan: NativeRecurrentPlan) -> Any:
        if plan.in_torch is None:
            plan.in_torch = self._torch_ops.plan_recurrent(plan.slots, plan.positions, plan.counts)
        return plan.in_torch

    def _run(
        self,
        desc: RecurrentDesc,
        mixed: Tensor,
        gate: Tensor,
        beta: Tensor | None,
        decay: Tensor,
        shape: RecurrentShape,
        state: Tensor,
        plan: NativeRecurrentPlan,
    ) -> Tensor:
        num_tokens = len(plan.positions)
        assert mixed.shape == (num_tokens, shape.channels) and gate.shape == (num_tokens, shape.values)
        assert decay.shape == (num_tokens, shape.keys if desc.by_channel else shape.num_heads)
        assert shape.num_heads % shape.num_groups == 0 and shape.values % desc.norm_groups == 0
        out = mixed.new_empty(num_tokens, shape.values)
        self._library.quire_recurrent(
            self._context,
            byref(desc),
            byref(_rows(state, plan)),
            byref(_projection_columns(mixed)),
            byref(_projection_columns(gate)),
            byref(_projection_columns(beta)),
            byref(_projection_columns(decay)),
            out.data_ptr(),
        )
        return out


def _is_plain(weights: DeltaWeights | MambaWeights | ConvWeights, *inputs: Tensor) -> bool:
    """Whether the library supports the tensors: float32, each token and slot contiguous, weights contiguous."""
    kept = [getattr(weights, name) for name in weights.__slots__]
    return all(x.dtype == torch.float32 and x.stride(1) == 1 for x in inputs) and all(
        w.dtype == torch.float32 and w.is_contiguous() for w in kept if isinstance(w, Tensor)
    )


def _delta_desc(weights: DeltaWeights, shape: RecurrentShape, by_channel: bool = False) -> RecurrentDesc:
    return RecurrentDesc(
        _address(weights.conv),
        None,
        _address(weights.a_log),
        _address(weights.dt_bias),
        None,
        _address(weights.norm),
        *_sizes(shape),
        1,
        weights.eps,
        0.0,
        0.0,
        shape.beta_top,
        False,
        by_channel,
    )


def _sizes(shape: RecurrentShape) -> tuple[int, ...]:
    return shape.num_groups, shape.num_heads, shape.key_dim, shape.value_dim, shape.conv_len


def _rows(state: Tensor, plan: NativeRecurrentPlan) -> RowsDesc:
    firsts, counts = (None, None) if plan.starts is None else plan.starts
    return RowsDesc(
        state.data_ptr(),
        state.stride(0),
        plan.slots.data_ptr(),
        plan.positions.data_ptr(),
        _address(firsts),
        _address(counts),
        len(plan.slots),
        len(plan.positions),
    )


def _projection_columns(x: Tensor | None) -> ProjectionColumns:
    return ProjectionColumns(None, 0) if x is None else ProjectionColumns(x.data_ptr(), x.stride(0))


def _address(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.data_ptr()
