"""Inputs of the chunked prefill of recurrent layers: the convolution, and the running sums of the gates.

Both are written chunk by chunk: a head's part of a chunk is contiguous and always complete, with zeros for tokens past
the row's end. So the following kernels need neither masks nor an address per token, which would otherwise dominate
their instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor, float32

from quire.kernels.recurrent_types import RecurrentShape
from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.recurrent.step import L2_EPS, silu, softplus

TOKENS = 8  # tokens per program, all loaded before the first is computed
CHANNELS = 1024  # channels per program: sixteen bytes per thread
GATES = 8  # heads per program of the gates kernel


@dataclass(frozen=True, slots=True)
class ConvolvedChunks:
    """Convolved and gated inputs of prefill rows, by chunk."""

    keys: Tensor  # [chunks, 2 groups, chunk, key block]: keys and queries in the order of the channels
    values: Tensor  # [chunks, heads, chunk, value block]
    gates: Tensor  # [chunks, heads, 2, chunk] float32: running sum of log decays; beta, or Mamba2's time step


@triton.jit
def _joined(first, second):
    """Concatenation of two tuples; Triton does not support unpacking (`*`)."""
    return first + second


@triton.jit
def _conv_kernel(
    x_ptr,
    conv_ptr,
    bias_ptr,
    state_ptr,
    mixed_ptr,
    slots_ptr,
    positions_ptr,
    tiles_ptr,
    x_stride,
    slot_stride,
    query_scale,
    COLUMN: tl.constexpr,
    CHANNEL: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    DIM: tl.constexpr,
    RING: tl.constexpr,
    RING_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: TOKENS tokens of a chunk, for UNITS heads of DIM channels each. Each input is read once and moves
    from tap to tap in registers."""
    let_next_start(PDL)
    tile, offset = tl.program_id(0), tl.program_id(2) * TOKENS
    units, columns = tl.program_id(1) * UNITS + tl.arange(0, UNITS), tl.arange(0, WIDTH)
    channels = CHANNEL + units[:, None] * DIM + columns[None, :]  # [units, width]
    inside = tl.full((UNITS, WIDTH), True, tl.int1)
    if DIM != WIDTH or NUM_UNITS % UNITS != 0:
        inside = (units < NUM_UNITS)[:, None] & (columns < DIM)[None, :]
    wait_for_inputs(PDL)
    taps = ()
    for age in tl.static_range(TAPS):
        tap = tl.load(conv_ptr + (TAPS - 1 - age) * RING_CHANNELS + channels, mask=inside, other=0.0)
        taps = _joined(taps, (tap.to(tl.float32),))
    bias = tl.zeros((UNITS, WIDTH), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    row, first = tl.load(tiles_ptr + 4 * tile), tl.load(tiles_ptr + 4 * tile + 1).to(tl.int64)
    start, count = tl.load(tiles_ptr + 4 * tile + 2) + offset, tl.load(tiles_ptr + 4 * tile + 3)
    source = x_ptr + (first + start) * x_stride + COLUMN + channels
    inputs = ()
    for token in tl.static_range(TOKENS):
        x = tl.load(source + token * x_stride, mask=inside & (start + token < count), other=0.0)
        inputs = _joined(inputs, (x,))
    position = tl.load(positions_ptr + first)
    ring = state_ptr + tl.load(slots_ptr + row) * slot_stride + RING + channels
    past = ()  # most recent first
    for age in tl.static_range(1, TAPS):
        before = start - age  # the row's first tokens take older inputs from the ring
        x = tl.load(source - age * x_stride, mask=inside & (before >= 0) & (before < count), other=0.0).to(tl.float32)
        entry = (position + before + TAPS) % TAPS
        kept = tl.load(ring + entry * RING_CHANNELS, mask=inside & (before < 0), other=0.0)
        past = _joined(past, (x + kept,))
    target = mixed_ptr + (tile.to(tl.int64) * NUM_UNITS + units[:, None]) * (CHUNK * WIDTH) + columns[None, :]
    for token in tl.static_range(TOKENS):
        x = inputs[token].to(tl.float32)
        total = x * taps[0] + bias
        for age in tl.static_range(1, TAPS):
            total += past[age - 1] * taps[age]
        past = _joined((x,), past[: TAPS - 2])
        total = silu(total)
        if NORM:
            scale = tl.rsqrt(tl.sum(tl.where(inside, total * total, 0.0), 1) + L2_EPS)
            total *= tl.where(units < QUERIES, scale * query_scale, scale)[:, None]
        total = tl.where(inside & (start + token < count), total, 0.0)
        tl.store(
            target + (offset + token) * WIDTH, total.to(mixed_ptr.dtype.element_ty), mask=(units < NUM_UNITS)[:, None]
        )


@triton.jit
def _gates_kernel(
    x_ptr,
    a_log_ptr,
    dt_bias_ptr,
    gates_ptr,
    tiles_ptr,
    x_stride,
    dt_low,
    dt_high,
    COLUMN: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    DELTA: tl.constexpr,
    BETA_TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the gates of BLOCK heads of one chunk."""
    let_next_start(PDL)
    tile = tl.program_id(0)
    heads, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHUNK)
    a_log = tl.load(a_log_ptr + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    start = tl.load(tiles_ptr + 4 * tile + 2)
    tokens = tl.load(tiles_ptr + 4 * tile + 1).to(tl.int64) + start + n
    inside = (start + n < tl.load(tiles_ptr + 4 * tile + 3))[:, None] & (heads < HEADS)[None, :]
    source = x_ptr + tokens[:, None] * x_stride + COLUMN + heads[None, :]
    step = tl.load(source + (HEADS if DELTA else 0), mask=inside, other=0.0).to(tl.float32)
    step = softplus(step + dt_bias[None, :])
    if not DELTA:
        step = tl.minimum(tl.maximum(step, dt_low), dt_high)
    step = tl.where(inside, step, 0.0)
    total = tl.cumsum(-tl.exp(a_log)[None, :] * step, 0)
    if DELTA:
        beta = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        step = tl.where(inside, BETA_TOP * tl.sigmoid(beta), 0.0)
    target = gates_ptr + (tile * HEADS + heads[None, :]) * (2 * CHUNK) + n[:, None]
    tl.store(target, total, mask=(heads < HEADS)[None, :])
    tl.store(target + CHUNK, step, mask=(heads < HEADS)[None, :])


def convolve(
    x: Tensor,
    conv: Tensor,
    bias: Tensor | None,
    a_log: Tensor,
    dt_bias: Tensor,
    dt_low: float,
    dt_high: float,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    tiles: Tensor,
    chunk: int,
    *,
    delta: bool,
) -> ConvolvedChunks:
    """Convolve x [tokens, ...] and compute its gates. x is the output of the input projection: channels, gate and steps
    for the delta rule; gate, channels and steps for Mamba2. The rings are not written."""
    num_tiles, heads = len(tiles), shape.num_heads
    keys, values = convolve_channels(x, conv, bias, shape, state, slots, positions, tiles, chunk, delta=delta)
    gates = x.new_empty(num_tiles, heads, 2, chunk, dtype=float32)
    _gates_kernel[(num_tiles, triton.cdiv(heads, GATES))](
        x,
        a_log,
        dt_bias,
        gates,
        tiles,
        x.stride(0),
        dt_low,
        dt_high,
        COLUMN=shape.channels + shape.values,
        HEADS=heads,
        BLOCK=GATES,
        CHUNK=chunk,
        DELTA=delta,
        BETA_TOP=shape.beta_top,
        **launch_options(x.device, 1),
    )
    return ConvolvedChunks(keys, values, gates)


def convolve_channels(
    x: Tensor,
    conv: Tensor,
    bias: Tensor | None,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    tiles: Tensor,
    chunk: int,
    *,
    delta: bool,
) -> tuple[Tensor, Tensor]:
    """Keys and values of `ConvolvedChunks`. For the delta rule, queries and keys are L2-normalized and the channels
    come first in x; for Mamba2 a gate precedes them."""
    taps = taps_first(conv, shape)
    keys = convolve_keys(x, taps, bias, shape, state, slots, positions, tiles, chunk, delta=delta)
    values = x.new_empty(len(tiles), shape.num_heads, chunk, block(shape.value_dim))
    _convolve_part(
        values,
        2 * shape.keys if delta else 0,
        shape.value_dim,
        False,
        x,
        taps,
        bias,
        shape,
        state,
        slots,
        positions,
        tiles,
        delta,
    )
    return keys, values


def taps_first(conv: Tensor, shape: RecurrentShape) -> Tensor:
    """The convolution's weights as [conv_len, channels], so that the channels of a thread are contiguous."""
    return conv.view(shape.channels, shape.conv_len).t().contiguous()


def convolve_keys(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    tiles: Tensor,
    chunk: int,
    *,
    delta: bool,
) -> Tensor:
    """Keys and queries alone, in the layout of `ConvolvedChunks.keys`."""
    keys = x.new_empty(len(tiles), 2 * shape.num_groups, chunk, block(shape.key_dim))
    _convolve_part(
        keys,
        0 if delta else shape.values,
        shape.key_dim,
        delta,
        x,
        taps,
        bias,
        shape,
        state,
        slots,
        positions,
        tiles,
        delta,
    )
    return keys


def _convolve_part(
    mixed: Tensor,
    channel: int,
    dim: int,
    norm: bool,
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    tiles: Tensor,
    delta: bool,
) -> None:
    """Convolve all units of `dim` channels from `channel` on, into `mixed` [chunks, units, chunk, block]."""
    num_tiles, num_units, chunk, width = mixed.shape
    units = max(CHANNELS // width, 1)
    _conv_kernel[(num_tiles, triton.cdiv(num_units, units), chunk // TOKENS)](
        x,
        taps,
        bias,
        state,
        mixed,
        slots,
        positions,
        tiles,
        x.stride(0),
        state.stride(0),
        shape.key_dim**-0.5,
        COLUMN=0 if delta else shape.values,
        CHANNEL=channel,
        NUM_UNITS=num_units,
        DIM=dim,
        RING=shape.matrix_elements,
        RING_CHANNELS=shape.channels,
        TAPS=shape.conv_len,
        CHUNK=chunk,
        TOKENS=TOKENS,
        UNITS=units,
        WIDTH=width,
        QUERIES=shape.num_groups,
        NORM=norm,
        BIAS=bias is not None,
        **launch_options(x.device, 4),
    )


def block(dim: int) -> int:
    """Channels of a head in shared layouts: a power of two of at least 16."""
    return max(16, triton.next_power_of_2(dim))
