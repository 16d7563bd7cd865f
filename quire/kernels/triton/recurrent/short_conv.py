"""Short convolution between two gates (LFM2), whose only state is its last inputs; the counterpart of
`reference.recurrent.short_conv`.

Decode rows have one kernel. Prefill rows have one for their tokens and one for their rings, which run in this order
because the first tokens read the rings. Products of two 16-bit numbers are exact in float32, and each sum has a fixed
order, so a token's bits do not depend on the rest of the step: the deterministic mode uses these kernels too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrent_types import ConvShape, ConvWeights
from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.recurrent.recurrent import TritonRecurrentPlan, prepare
from quire.kernels.triton.recurrent.step import find_token

CHUNK = 64  # tokens per tile of the step's plan
TOKENS = 8  # tokens per program, all loaded before the first is computed
CHANNELS = 512  # channels per program
STEP_CHANNELS = 256  # channels per program of the decode kernel


@triton.jit
def _joined(first, second):
    """Concatenation of two tuples; Triton does not support unpacking (`*`)."""
    return first + second


@triton.jit
def _gated(x_ptr, channels, inside, WIDTH: tl.constexpr):
    """The convolution's input of the token at x (gated), in float32."""
    gate = tl.load(x_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    return gate * tl.load(x_ptr + 2 * WIDTH + channels, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_taps(conv_ptr, bias_ptr, channels, inside, TAPS: tl.constexpr, BIAS: tl.constexpr):
    """Weights of the current input and of the preceding ones, most recent first, and the bias."""
    taps = ()
    for age in tl.static_range(TAPS):
        tap = tl.load(conv_ptr + channels * TAPS + TAPS - 1 - age, mask=inside, other=0.0)
        taps = _joined(taps, (tap.to(tl.float32),))
    bias = tl.zeros(channels.shape, tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    return taps, bias


@triton.jit
def _mix(now, past, taps, bias, TAPS: tl.constexpr):
    """The convolution's sum. Each term is one `fma`, so that all kernels round alike."""
    total = tl.fma(now, taps[0], bias)
    for age in tl.static_range(1, TAPS):
        total = tl.fma(past[age - 1], taps[age], total)
    return total


@triton.jit
def _step_kernel(
    x_ptr,
    conv_ptr,
    bias_ptr,
    state_ptr,
    out_ptr,
    slots_ptr,
    positions_ptr,
    rows_ptr,
    tokens_ptr,
    x_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    INDEXED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: some channels of one row's only token. Writes the input to its ring entry, which is not read before
    the next step."""
    let_next_start(PDL)
    place, channels = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < WIDTH
    taps, bias = _load_taps(conv_ptr, bias_ptr, channels, inside, TAPS, BIAS)
    # Slots, positions and states are older than the kernel that produces x: see `recurrent.step`.
    slot, token, position = find_token(rows_ptr, tokens_ptr, slots_ptr, positions_ptr, place, INDEXED)
    ring_ptr = state_ptr + slot * slot_stride + channels
    past = ()  # most recent first
    for age in tl.static_range(1, TAPS):
        entry = (position + TAPS - age) % TAPS
        past = _joined(past, (tl.load(ring_ptr + entry * WIDTH, mask=inside, other=0.0),))
    wait_for_inputs(PDL)
    x_ptr += token * x_stride
    now = _gated(x_ptr, channels, inside, WIDTH)
    out_gate = tl.load(x_ptr + WIDTH + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(ring_ptr + (position % TAPS) * WIDTH, now, mask=inside)
    total = _mix(now, past, taps, bias, TAPS) * out_gate
    tl.store(out_ptr + token * WIDTH + channels, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _catch_up_kernel(
    x_ptr,
    conv_ptr,
    bias_ptr,
    state_ptr,
    out_ptr,
    slots_ptr,
    positions_ptr,
    tiles_ptr,
    x_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: some channels of TOKENS tokens of a tile. Each input is read once and moves from tap to tap in
    registers. The rings are not written."""
    let_next_start(PDL)
    tile, channels = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < WIDTH
    taps, bias = _load_taps(conv_ptr, bias_ptr, channels, inside, TAPS, BIAS)
    wait_for_inputs(PDL)
    row, first = tl.load(tiles_ptr + 4 * tile), tl.load(tiles_ptr + 4 * tile + 1).to(tl.int64)
    start = tl.load(tiles_ptr + 4 * tile + 2) + tl.program_id(2) * TOKENS
    count = tl.load(tiles_ptr + 4 * tile + 3)
    source = x_ptr + (first + start) * x_stride
    inputs = ()
    gates = ()
    for token in tl.static_range(TOKENS):
        there = inside & (start + token < count)
        inputs = _joined(inputs, (_gated(source + token * x_stride, channels, there, WIDTH),))
        gate = tl.load(source + token * x_stride + WIDTH + channels, mask=there, other=0.0)
        gates = _joined(gates, (gate.to(tl.float32),))
    position = tl.load(positions_ptr + first)
    ring_ptr = state_ptr + tl.load(slots_ptr + row) * slot_stride + channels
    past = ()  # most recent first
    for age in tl.static_range(1, TAPS):
        before = start - age  # the row's first tokens take older inputs from the ring
        here = _gated(source - age * x_stride, channels, inside & (before >= 0) & (before < count), WIDTH)
        entry = (position + before + TAPS) % TAPS
        kept = tl.load(ring_ptr + entry * WIDTH, mask=inside & (before < 0), other=0.0)
        past = _joined(past, (tl.where(before < 0, kept, here),))
    target = out_ptr + (first + start) * WIDTH + channels
    for token in tl.static_range(TOKENS):
        total = _mix(inputs[token], past, taps, bias, TAPS) * gates[token]
        past = _joined((inputs[token],), past[: TAPS - 2])
        tl.store(target + token * WIDTH, total.to(out_ptr.dtype.element_ty), mask=inside & (start + token < count))


@triton.jit
def _rings_kernel(
    x_ptr,
    state_ptr,
    slots_ptr,
    positions_ptr,
    rows_ptr,
    x_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: writes the last inputs of some channels of one row to its ring."""
    let_next_start(PDL)
    place, channels = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    row, first = tl.load(rows_ptr + 4 * place), tl.load(rows_ptr + 4 * place + 1).to(tl.int64)
    count = tl.load(rows_ptr + 4 * place + 2)
    position = tl.load(positions_ptr + first)
    ring_ptr = state_ptr + tl.load(slots_ptr + row) * slot_stride + channels
    for age in tl.static_range(TAPS):
        token = count - 1 - age
        there = (channels < WIDTH) & (token >= 0)
        now = _gated(x_ptr + (first + token) * x_stride, channels, there, WIDTH)
        tl.store(ring_ptr + ((position + token + TAPS) % TAPS) * WIDTH, now, mask=there)


def short_conv(x: Tensor, weights: ConvWeights, shape: ConvShape, state: Tensor, plan: TritonRecurrentPlan) -> Tensor:
    """Implements `reference.recurrent.short_conv`."""
    work = prepare(plan, CHUNK)
    width, taps = shape.channels, shape.conv_len
    out = x.new_empty(len(x), width)
    where = (state, out, plan.slots, plan.positions)
    strides = (x.stride(0), state.stride(0))
    fixed = {"WIDTH": width, "TAPS": taps, "BIAS": weights.bias is not None}
    if work.rows is not None and work.tiles is not None:
        blocks = triton.cdiv(width, CHANNELS)
        _catch_up_kernel[(len(work.tiles), blocks, CHUNK // TOKENS)](
            x,
            weights.conv,
            weights.bias,
            *where,
            work.tiles,
            *strides,
            **fixed,
            TOKENS=TOKENS,
            BLOCK=CHANNELS,
            **launch_options(x.device, 4),
        )
        _rings_kernel[(len(work.rows), blocks)](
            x,
            state,
            plan.slots,
            plan.positions,
            work.rows,
            *strides,
            WIDTH=width,
            TAPS=taps,
            BLOCK=CHANNELS,
            **launch_options(x.device, 4),
        )
    if work.num_decodes:
        _step_kernel[(work.num_decodes, triton.cdiv(width, STEP_CHANNELS))](
            x,
            weights.conv,
            weights.bias,
            *where,
            work.decodes,
            work.decode_tokens,
            *strides,
            **fixed,
            BLOCK=STEP_CHANNELS,
            INDEXED=work.decodes is not None,
            **launch_options(x.device, 2),
        )
    return out
