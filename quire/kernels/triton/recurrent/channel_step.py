"""Decode step of Kimi Delta Attention in one kernel: `recurrent.step` with one decay per key channel.

Each head has its own key and query, so a program owns all channels of its head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrent_types import DeltaWeights, RecurrentShape
from quire.kernels.triton.launch import launch_options, let_next_start, num_multiprocessors, wait_for_inputs
from quire.kernels.triton.recurrent.step import (
    L2_EPS,
    StepTuning,
    conv_now,
    find_token,
    older,
    softplus,
    tune,
)


@triton.jit
def _channel_step_kernel(
    x_ptr,
    forget_ptr,
    gate_ptr,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    state_ptr,
    out_ptr,
    slots_ptr,
    positions_ptr,
    rows_ptr,
    tokens_ptr,
    x_stride,
    forget_stride,
    gate_stride,
    slot_stride,
    eps,
    query_scale,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TAPS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BETA_TOP: tl.constexpr,
    INDEXED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one head of one row, VALUE_BLOCK rows of its matrix at a time."""
    let_next_start(PDL)
    place, head = tl.program_id(0), tl.program_id(1)
    CHANNELS: tl.constexpr = HEADS * (VALUE + 2 * KEY)
    keys, first_values = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    in_key = keys < KEY
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head * KEY + keys, mask=in_key, other=0.0).to(tl.float32)
    # Inputs older than this step are loaded while the preceding kernel still runs, as in `recurrent.step`.
    slot, token, position = find_token(rows_ptr, tokens_ptr, slots_ptr, positions_ptr, place, INDEXED)
    state_ptr += slot * slot_stride
    ring_ptr = state_ptr + HEADS * VALUE * KEY
    x_ptr += token * x_stride
    q_channels = head * KEY + keys
    k_channels = HEADS * KEY + q_channels
    matrix_ptr = state_ptr + head * (VALUE * KEY) + first_values[:, None] * KEY + keys[None, :]
    ahead = tl.load(matrix_ptr, mask=(first_values < VALUE)[:, None] & in_key[None, :], other=0.0)  # [value, key]
    q_past, q_tap = older(ring_ptr, conv_ptr, None, q_channels, in_key, position, CHANNELS, TAPS, False)
    k_past, k_tap = older(ring_ptr, conv_ptr, None, k_channels, in_key, position, CHANNELS, TAPS, False)
    v_channels = 2 * HEADS * KEY + head * VALUE + first_values
    WHOLE: tl.constexpr = NUM_BLOCKS == 1
    if WHOLE:
        v_past, v_tap = older(
            ring_ptr, conv_ptr, None, v_channels, first_values < VALUE, position, CHANNELS, TAPS, False
        )
    wait_for_inputs(PDL)
    beta = BETA_TOP * tl.sigmoid(tl.load(x_ptr + CHANNELS + head).to(tl.float32))
    forget = tl.load(forget_ptr + token * forget_stride + head * KEY + keys, mask=in_key, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.exp(a_log) * softplus(forget + dt_bias))  # [key]
    q = conv_now(x_ptr, ring_ptr, q_channels, in_key, position, True, q_past, q_tap, CHANNELS, TAPS)
    k = conv_now(x_ptr, ring_ptr, k_channels, in_key, position, True, k_past, k_tap, CHANNELS, TAPS)
    q *= tl.rsqrt(tl.sum(tl.where(in_key, q * q, 0.0), 0) + L2_EPS) * query_scale
    k *= tl.rsqrt(tl.sum(tl.where(in_key, k * k, 0.0), 0) + L2_EPS)
    blocks = tl.arange(0, NUM_BLOCKS)[:, None]
    out = tl.zeros((NUM_BLOCKS, VALUE_BLOCK), tl.float32)
    for block in range(NUM_BLOCKS):
        values = block * VALUE_BLOCK + first_values
        in_value = values < VALUE
        matrix = ahead * decay[None, :]
        if not WHOLE:  # prefetch the next rows before the current ones are finished
            ahead = tl.load(
                matrix_ptr + VALUE_BLOCK * KEY,
                other=0.0,
                mask=(values + VALUE_BLOCK < VALUE)[:, None] & in_key[None, :],
            )
            v_channels = 2 * HEADS * KEY + head * VALUE + values
            v_past, v_tap = older(ring_ptr, conv_ptr, None, v_channels, in_value, position, CHANNELS, TAPS, False)
        v = conv_now(x_ptr, ring_ptr, v_channels, in_value, position, True, v_past, v_tap, CHANNELS, TAPS)
        update = (v - tl.sum(matrix * k[None, :], 1)) * beta
        matrix += update[:, None] * k[None, :]
        tl.store(matrix_ptr, matrix, mask=in_value[:, None] & in_key[None, :])
        matrix_ptr += VALUE_BLOCK * KEY
        out = tl.where(blocks == block, tl.sum(matrix * q[None, :], 1)[None, :], out)
    values = blocks * VALUE_BLOCK + first_values[None, :]
    in_value = values < VALUE
    squares = tl.sum(tl.sum(tl.where(in_value, out * out, 0.0), 1), 0)
    out *= tl.rsqrt(squares / VALUE + eps) * tl.load(norm_ptr + values, mask=in_value, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + head * VALUE + values, mask=in_value, other=0.0).to(tl.float32)
    target = out_ptr + token * (HEADS * VALUE) + head * VALUE + values
    tl.store(target, (out * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty), mask=in_value)


def channel_step(
    x: Tensor,
    forget: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor | None,
    tokens: Tensor | None,
    out: Tensor,
    tuning: StepTuning | None = None,
    early: bool = True,
) -> None:
    """Apply the layer to the rows' single tokens, into `out` [tokens, values]. `rows` and `tokens`: the rows and tokens
    of the step to compute; None: all, in order. `tuning`: chosen by their number when None. `early`: the states and
    lists are older than this step, so they may be read before the preceding kernel ends."""
    num_rows = len(slots) if rows is None else len(rows)
    key_block, value_block = triton.next_power_of_2(shape.key_dim), triton.next_power_of_2(shape.value_dim)
    if tuning is None:
        processors = num_multiprocessors(x.device.index)
        tuning = tune(num_rows * shape.num_heads, key_block, value_block, processors, delta=True)
    _channel_step_kernel[(num_rows, shape.num_heads)](
        x,
        forget,
        gate,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.norm,
        state,
        out,
        slots,
        positions,
        rows,
        tokens,
        x.stride(0),
        forget.stride(0),
        gate.stride(0),
        state.stride(0),
        weights.eps,
        shape.key_dim**-0.5,
        HEADS=shape.num_heads,
        KEY=shape.key_dim,
        VALUE=shape.value_dim,
        TAPS=shape.conv_len,
        KEY_BLOCK=key_block,
        VALUE_BLOCK=tuning.value_block,
        NUM_BLOCKS=value_block // tuning.value_block,
        BETA_TOP=shape.beta_top,
        INDEXED=rows is not None,
        **launch_options(x.device, tuning.num_warps, early=early),
    )
