"""Recurrent layers of the deterministic mode on CUDA: token by token, in prefill as in decode.

A chunked scan adds in another order than single steps, so none is used: a program holds the matrix of one head of one
row and walks over all tokens the row has in this step. `docs/reliability.md` states the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrent_types import ConvShape, ConvWeights, DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.recurrent import recurrent
from quire.kernels.triton.recurrent import short_conv as recurrent_short
from quire.kernels.triton.recurrent.channel_step import channel_step
from quire.kernels.triton.recurrent.recurrent import TritonRecurrentPlan, norm_groups
from quire.kernels.triton.recurrent.step import L2_EPS, StepTuning, silu, softplus
from quire.kernels.upload import upload

RING_BLOCK = 1024  # channels that one program writes to a ring


@triton.jit
def _convolve(
    x_ptr,
    x_stride,
    ring_ptr,
    conv_ptr,
    bias_ptr,
    channels,
    inside,
    position,
    num_before,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """SiLU of these channels' convolution at `position`, float32. Inputs of the `num_before` preceding tokens of this
    step are read from x, older ones from the ring, which is not written before all programs have read it."""
    total = tl.load(x_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    total *= tl.load(conv_ptr + channels * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    for age in tl.static_range(1, TAPS):
        place = (position + TAPS - age) % TAPS
        near = tl.load(x_ptr - age * x_stride + channels, mask=inside & (num_before >= age), other=0.0)
        far = tl.load(ring_ptr + place * CHANNELS + channels, mask=inside & (num_before < age), other=0.0)
        before = tl.where(num_before >= age, near.to(tl.float32), far)
        total += before * tl.load(conv_ptr + channels * TAPS + TAPS - 1 - age, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    return silu(total)


@triton.jit
def _token_walk_kernel(
    x_ptr,
    conv_ptr,
    conv_bias_ptr,
    a_log_ptr,
    dt_bias_ptr,
    skip_ptr,
    norm_ptr,
    state_ptr,
    out_ptr,
    slots_ptr,
    positions_ptr,
    starts_ptr,
    x_stride,
    slot_stride,
    eps,
    dt_low,
    dt_high,
    query_scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TAPS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    DELTA: tl.constexpr,
    BETA_TOP: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: all tokens of one row through one head. DELTA: the gated delta net including its norm, else Mamba2
    without norm. GATED: apply the output gate."""
    let_next_start(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    CHANNELS: tl.constexpr = HEADS * VALUE + 2 * GROUPS * KEY
    Q: tl.constexpr = 0 if DELTA else HEADS * VALUE + GROUPS * KEY
    K: tl.constexpr = GROUPS * KEY if DELTA else HEADS * VALUE
    V: tl.constexpr = 2 * GROUPS * KEY if DELTA else 0
    MIXED: tl.constexpr = 0 if DELTA else HEADS * VALUE  # first column of the convolution's inputs
    GATES: tl.constexpr = CHANNELS + HEADS * VALUE  # gates follow the channels and the output gate
    group = head // (HEADS // GROUPS)
    keys, values = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    in_key, in_value = keys < KEY, values < VALUE
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    wait_for_inputs(PDL)
    first = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - first
    state_ptr += tl.load(slots_ptr + row) * slot_stride
    ring_ptr = state_ptr + HEADS * VALUE * KEY
    matrix_ptr = state_ptr + head * (VALUE * KEY) + values[:, None] * KEY + keys[None, :]
    matrix = tl.load(matrix_ptr, mask=in_value[:, None] & in_key[None, :], other=0.0)  # [value, key]
    for index in range(count):
        token = (first + index).to(tl.int64)
        position = tl.maximum(tl.load(positions_ptr + token), 0)  # below 0: a row that pads the step
        at_ptr = x_ptr + token * x_stride
        q = _convolve(
            at_ptr + MIXED,
            x_stride,
            ring_ptr,
            conv_ptr,
            conv_bias_ptr,
            Q + group * KEY + keys,
            in_key,
            position,
            index,
            CHANNELS,
            TAPS,
            BIAS,
        )
        k = _convolve(
            at_ptr + MIXED,
            x_stride,
            ring_ptr,
            conv_ptr,
            conv_bias_ptr,
            K + group * KEY + keys,
            in_key,
            position,
            index,
            CHANNELS,
            TAPS,
            BIAS,
        )
        v = _convolve(
            at_ptr + MIXED,
            x_stride,
            ring_ptr,
            conv_ptr,
            conv_bias_ptr,
            V + head * VALUE + values,
            in_value,
            position,
            index,
            CHANNELS,
            TAPS,
            BIAS,
        )
        if DELTA:
            beta = BETA_TOP * tl.sigmoid(tl.load(at_ptr + GATES + head).to(tl.float32))
            dt = softplus(tl.load(at_ptr + GATES + HEADS + head).to(tl.float32) + dt_bias)
            q *= tl.rsqrt(tl.sum(tl.where(in_key, q * q, 0.0), 0) + L2_EPS) * query_scale
            k *= tl.rsqrt(tl.sum(tl.where(in_key, k * k, 0.0), 0) + L2_EPS)
        else:
            dt = softplus(tl.load(at_ptr + GATES + head).to(tl.float32) + dt_bias)
            dt = tl.minimum(tl.maximum(dt, dt_low), dt_high)
        matrix *= tl.exp(-tl.exp(a_log) * dt)
        if DELTA:
            update = (v - tl.sum(matrix * k[None, :], 1)) * beta
        else:
            update = v * dt
        matrix += update[:, None] * k[None, :]
        out = tl.sum(matrix * q[None, :], 1)
        if DELTA:
            out *= tl.rsqrt(tl.sum(tl.where(in_value, out * out, 0.0), 0) / VALUE + eps)
            out *= tl.load(norm_ptr + values, mask=in_value, other=0.0).to(tl.float32)
        else:
            out += v * tl.load(skip_ptr + head).to(tl.float32)
        if GATED:
            GATE: tl.constexpr = CHANNELS if DELTA else 0
            out *= silu(tl.load(at_ptr + GATE + head * VALUE + values, mask=in_value, other=0.0).to(tl.float32))
        target = out_ptr + token * (HEADS * VALUE) + head * VALUE + values
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=in_value)
    tl.store(matrix_ptr, matrix, mask=in_value[:, None] & in_key[None, :])


@triton.jit
def _ring_kernel(
    x_ptr,
    state_ptr,
    slots_ptr,
    positions_ptr,
    starts_ptr,
    x_stride,
    slot_stride,
    MATRICES: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: writes the last inputs of BLOCK channels of one row to its ring."""
    let_next_start(PDL)
    row = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    wait_for_inputs(PDL)
    first, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    ring_ptr = state_ptr + tl.load(slots_ptr + row) * slot_stride + MATRICES
    for age in tl.static_range(TAPS):
        token = tl.maximum(end - 1 - age, first).to(tl.int64)
        there = inside & (end - 1 - age >= first)
        place = tl.maximum(tl.load(positions_ptr + token), 0) % TAPS
        x = tl.load(x_ptr + token * x_stride + channels, mask=there, other=0.0)
        tl.store(ring_ptr + place * CHANNELS + channels, x.to(tl.float32), mask=there)


# ---------------------------------------------------------------------------------------------------------------------
# Launching


@dataclass(frozen=True, slots=True)
class WalkPlan:
    """A step's rows for the deterministic recurrent layers."""

    slots: Tensor  # [rows] int64
    positions: Tensor  # [tokens] int64
    starts: Tensor  # [rows + 1] int64: first token of each row
    default_plan: TritonRecurrentPlan  # plan for kernels that are batch-invariant anyway


def plan_recurrent(slots: Tensor, positions: Tensor, counts: list[int]) -> WalkPlan:
    """As `recurrent.plan_recurrent`. A step of single tokens needs nothing from the host, so it can be captured."""
    default_plan = recurrent.plan_recurrent(slots, positions, counts)
    if all(count == 1 for count in counts):
        return WalkPlan(slots, positions, torch.arange(len(counts) + 1, device=slots.device), default_plan)
    starts = np.cumsum([0, *counts]).astype(np.int64)
    return WalkPlan(
        slots, positions, upload({"plan": {"starts": starts}}, slots.device)["plan"]["starts"], default_plan
    )


def gated_delta_net(x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, plan: WalkPlan) -> Tensor:
    """As `recurrent.gated_delta_net`."""
    return _walk(
        x,
        weights.conv,
        None,
        weights.a_log,
        weights.dt_bias,
        None,
        weights.norm,
        weights.eps,
        0.0,
        0.0,
        True,
        shape,
        state,
        plan,
    )


def channel_delta_net(
    x: Tensor, forget: Tensor, gate: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, plan: WalkPlan
) -> Tensor:
    """As `channel_delta.channel_delta_net`, by single-token steps of one form only: as many launches as the longest row
    has tokens. A walking kernel is only worth writing once the mode covers such a model on CUDA."""
    out, counts, device = x.new_empty(len(x), shape.values), plan.default_plan.counts, x.device
    key_block, value_block = triton.next_power_of_2(shape.key_dim), triton.next_power_of_2(shape.value_dim)
    tuning = StepTuning(value_block, min(8, max(1, key_block * value_block // 1024)))
    if all(count == 1 for count in counts):
        lists = [torch.arange(len(counts), device=device)]
    else:
        left = [[row for row, count in enumerate(counts) if count > index] for index in range(max(counts))]
        rows = upload({"plan": {"rows": np.concatenate(left).astype(np.int64)}}, device)["plan"]["rows"]
        lists = list(rows.split([len(each) for each in left]))
    for index, rows in enumerate(lists):  # each reads the states that the preceding one wrote
        tokens = plan.starts[rows] + index
        channel_step(
            x, forget, gate, weights, shape, state, plan.slots, plan.positions, rows, tokens, out, tuning, early=False
        )
    return out


def mamba2(x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor, plan: WalkPlan) -> Tensor:
    """As `recurrent.mamba2`."""
    out = _walk(
        x,
        weights.conv,
        weights.conv_bias,
        weights.a_log,
        weights.dt_bias,
        weights.skip,
        None,
        0.0,
        weights.dt_low,
        weights.dt_high,
        weights.norm is None,
        shape,
        state,
        plan,
    )
    if weights.norm is not None:
        norm_groups(out, x, weights, shape, gated=False)
    return out


def short_conv(x: Tensor, weights: ConvWeights, shape: ConvShape, state: Tensor, plan: WalkPlan) -> Tensor:
    """As `short_conv.short_conv`, which adds in one order for every token of a step."""
    return recurrent_short.short_conv(x, weights, shape, state, plan.default_plan)


def _walk(
    x: Tensor,
    conv: Tensor,
    conv_bias: Tensor | None,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor | None,
    norm: Tensor | None,
    eps: float,
    dt_low: float,
    dt_high: float,
    gated: bool,
    shape: RecurrentShape,
    state: Tensor,
    plan: WalkPlan,
) -> Tensor:
    """Launch the token walk and the ring update; tile sizes depend on the model's shape alone."""
    delta = norm is not None
    num_rows = len(plan.slots)
    out = x.new_empty(len(x), shape.values)
    key_block, value_block = triton.next_power_of_2(shape.key_dim), triton.next_power_of_2(shape.value_dim)
    _token_walk_kernel[(num_rows, shape.num_heads)](
        x,
        conv,
        conv_bias,
        a_log,
        dt_bias,
        skip,
        norm,
        state,
        out,
        plan.slots,
        plan.positions,
        plan.starts,
        x.stride(0),
        state.stride(0),
        eps,
        dt_low,
        dt_high,
        shape.key_dim**-0.5,
        HEADS=shape.num_heads,
        GROUPS=shape.num_groups,
        KEY=shape.key_dim,
        VALUE=shape.value_dim,
        TAPS=shape.conv_len,
        KEY_BLOCK=key_block,
        VALUE_BLOCK=value_block,
        DELTA=delta,
        BETA_TOP=shape.beta_top,
        GATED=gated,
        BIAS=conv_bias is not None,
        **launch_options(x.device, min(8, max(1, key_block * value_block // 1024))),
    )
    inputs = x if delta else x[:, shape.values :]  # inputs of the convolution
    _ring_kernel[(num_rows, triton.cdiv(shape.channels, RING_BLOCK))](
        inputs,
        state,
        plan.slots,
        plan.positions,
        plan.starts,
        x.stride(0),
        state.stride(0),
        MATRICES=shape.matrix_elements,
        CHANNELS=shape.channels,
        TAPS=shape.conv_len,
        BLOCK=RING_BLOCK,
        **launch_options(x.device, num_warps=4),
    )
    return out
