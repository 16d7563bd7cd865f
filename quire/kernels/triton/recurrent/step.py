"""Decode step of a recurrent layer, one token per row, in one kernel: convolution, gates, state update, read-out.

Bound by the bytes of the states: each matrix is read and written once. A program computes one head of one row. Heads
that share key and query channels each compute those themselves; one of them writes them to the convolution's ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrent_types import DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.triton.launch import (
    INTERPRETED,
    launch_options,
    let_next_start,
    num_multiprocessors,
    wait_for_inputs,
)

L2_EPS = tl.constexpr(1e-6)
FEW_PROGRAMS = 3  # programs per multiprocessor


if INTERPRETED:

    @triton.jit
    def silu(x):
        return x * tl.sigmoid(x)
else:

    @triton.jit
    def silu(x):
        """SiLU in float32, flushing denormals to zero: four instructions instead of twelve. About half of the
        convolution's instructions are SiLU."""
        sigmoid = tl.inline_asm_elementwise(
            """
            {
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }
            """,
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        return x * sigmoid


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def find_token(rows_ptr, tokens_ptr, slots_ptr, positions_ptr, place, INDEXED: tl.constexpr):
    """Slot, token index and position of a row's single token. INDEXED: rows and tokens are listed explicitly."""
    row = place
    token = place.to(tl.int64)
    if INDEXED:
        row = tl.load(rows_ptr + place)
        token = tl.load(tokens_ptr + place).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    return slot, token, tl.maximum(tl.load(positions_ptr + token), 0)  # below 0: a row that pads the step


@triton.jit
def older(
    ring_ptr,
    conv_ptr,
    bias_ptr,
    channels,
    inside,
    position,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The part of these channels' convolution at `position` that older inputs contribute (bias included), and the
    weight of the current input."""
    total = tl.zeros(channels.shape, tl.float32)
    for age in tl.static_range(1, TAPS):
        place = (position + TAPS - age) % TAPS
        before = tl.load(ring_ptr + place * CHANNELS + channels, mask=inside, other=0.0)
        total += before * tl.load(conv_ptr + channels * TAPS + TAPS - 1 - age, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    return total, tl.load(conv_ptr + channels * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def conv_now(
    x_ptr, ring_ptr, channels, inside, position, writes, past, tap, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    """SiLU of the complete convolution, float32. Writes the current input to its ring entry, which is not read before
    the next step."""
    now = tl.load(x_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(ring_ptr + (position % TAPS) * CHANNELS + channels, now, mask=inside & writes)
    return silu(past + now * tap)


@triton.jit
def _step_kernel(
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
    rows_ptr,
    tokens_ptr,
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
    NUM_BLOCKS: tl.constexpr,
    DELTA: tl.constexpr,
    BETA_TOP: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    INDEXED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one head of one row, VALUE_BLOCK rows of its matrix at a time. DELTA: the gated delta net including
    its norm, else Mamba2 without norm. GATED: apply the output gate."""
    let_next_start(PDL)
    place, head = tl.program_id(0), tl.program_id(1)
    CHANNELS: tl.constexpr = HEADS * VALUE + 2 * GROUPS * KEY
    group = head // (HEADS // GROUPS)
    writes = head % (HEADS // GROUPS) == 0
    keys = tl.arange(0, KEY_BLOCK)
    in_key = keys < KEY
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    # Slots and positions are older than this step's products, and a layer's state is older than the step: both are
    # loaded while the preceding kernel, which produces x, still runs. (Torch's embedding lookup has waited for all
    # earlier kernels.) Inputs of the convolution are loaded early only where programs are few; many programs are
    # limited by registers.
    EARLY: tl.constexpr = NUM_BLOCKS == 1
    slot, token, position = find_token(rows_ptr, tokens_ptr, slots_ptr, positions_ptr, place, INDEXED)
    state_ptr += slot * slot_stride
    ring_ptr = state_ptr + HEADS * VALUE * KEY
    x_ptr += token * x_stride
    Q: tl.constexpr = 0 if DELTA else HEADS * VALUE + GROUPS * KEY
    K: tl.constexpr = GROUPS * KEY if DELTA else HEADS * VALUE
    V: tl.constexpr = 2 * GROUPS * KEY if DELTA else 0
    q_channels = Q + group * KEY + keys
    k_channels = K + group * KEY + keys
    first_values = tl.arange(0, VALUE_BLOCK)
    v_channels = V + head * VALUE + first_values
    matrix_ptr = state_ptr + head * (VALUE * KEY) + first_values[:, None] * KEY + keys[None, :]
    # Prefetch: the first rows before anything is computed, later ones before the preceding rows are finished.
    ahead = tl.load(matrix_ptr, mask=(first_values < VALUE)[:, None] & in_key[None, :], other=0.0)  # [value, key]
    if EARLY:
        q_past, q_tap = older(ring_ptr, conv_ptr, conv_bias_ptr, q_channels, in_key, position, CHANNELS, TAPS, BIAS)
        k_past, k_tap = older(ring_ptr, conv_ptr, conv_bias_ptr, k_channels, in_key, position, CHANNELS, TAPS, BIAS)
        v_past, v_tap = older(
            ring_ptr, conv_ptr, conv_bias_ptr, v_channels, first_values < VALUE, position, CHANNELS, TAPS, BIAS
        )
    wait_for_inputs(PDL)
    if DELTA:
        mixed_ptr = x_ptr
        beta = BETA_TOP * tl.sigmoid(tl.load(x_ptr + CHANNELS + HEADS * VALUE + head).to(tl.float32))
        dt = softplus(tl.load(x_ptr + CHANNELS + HEADS * VALUE + HEADS + head).to(tl.float32) + dt_bias)
    else:
        mixed_ptr = x_ptr + HEADS * VALUE
        dt = softplus(tl.load(x_ptr + HEADS * VALUE + CHANNELS + head).to(tl.float32) + dt_bias)
        dt = tl.minimum(tl.maximum(dt, dt_low), dt_high)
        skip = tl.load(skip_ptr + head).to(tl.float32)
    if not EARLY:
        q_past, q_tap = older(ring_ptr, conv_ptr, conv_bias_ptr, q_channels, in_key, position, CHANNELS, TAPS, BIAS)
        k_past, k_tap = older(ring_ptr, conv_ptr, conv_bias_ptr, k_channels, in_key, position, CHANNELS, TAPS, BIAS)
    q = conv_now(mixed_ptr, ring_ptr, q_channels, in_key, position, writes, q_past, q_tap, CHANNELS, TAPS)
    k = conv_now(mixed_ptr, ring_ptr, k_channels, in_key, position, writes, k_past, k_tap, CHANNELS, TAPS)
    if DELTA:
        q *= tl.rsqrt(tl.sum(tl.where(in_key, q * q, 0.0), 0) + L2_EPS) * query_scale
        k *= tl.rsqrt(tl.sum(tl.where(in_key, k * k, 0.0), 0) + L2_EPS)
    decay = tl.exp(-tl.exp(a_log) * dt)
    blocks = tl.arange(0, NUM_BLOCKS)[:, None]
    out = tl.zeros((NUM_BLOCKS, VALUE_BLOCK), tl.float32)
    for block in range(NUM_BLOCKS):
        values = block * VALUE_BLOCK + first_values
        in_value = values < VALUE
        matrix = ahead * decay
        if not EARLY:
            ahead = tl.load(
                matrix_ptr + VALUE_BLOCK * KEY,
                other=0.0,
                mask=(values + VALUE_BLOCK < VALUE)[:, None] & in_key[None, :],
            )
            v_channels = V + head * VALUE + values
            v_past, v_tap = older(
                ring_ptr, conv_ptr, conv_bias_ptr, v_channels, in_value, position, CHANNELS, TAPS, BIAS
            )
        v = conv_now(mixed_ptr, ring_ptr, v_channels, in_value, position, True, v_past, v_tap, CHANNELS, TAPS)
        if DELTA:
            update = (v - tl.sum(matrix * k[None, :], 1)) * beta
        else:
            update = v * dt
        matrix += update[:, None] * k[None, :]
        tl.store(matrix_ptr, matrix, mask=in_value[:, None] & in_key[None, :])
        matrix_ptr += VALUE_BLOCK * KEY
        read = tl.sum(matrix * q[None, :], 1)
        if not DELTA:
            read += v * skip
        out = tl.where(blocks == block, read[None, :], out)
    values = blocks * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)[None, :]
    in_value = values < VALUE
    if DELTA:
        squares = tl.sum(tl.sum(tl.where(in_value, out * out, 0.0), 1), 0)
        out *= tl.rsqrt(squares / VALUE + eps)
        out *= tl.load(norm_ptr + values, mask=in_value, other=0.0).to(tl.float32)
    if GATED:
        GATE: tl.constexpr = CHANNELS if DELTA else 0
        gate = tl.load(x_ptr + GATE + head * VALUE + values, mask=in_value, other=0.0).to(tl.float32)
        out *= silu(gate)
    target = out_ptr + token * (HEADS * VALUE) + head * VALUE + values
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=in_value)


def delta_step(
    x: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor | None,
    tokens: Tensor | None,
    out: Tensor,
) -> None:
    """Apply the gated delta net to the rows' single tokens, into `out` [tokens, values]. `rows` and `tokens`: the rows
    and tokens of the step to compute; None: all, in order."""
    _launch(
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
        shape,
        state,
        slots,
        positions,
        rows,
        tokens,
        out,
        delta=True,
        gated=True,
    )


def mamba_step(
    x: Tensor,
    weights: MambaWeights,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor | None,
    tokens: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
) -> None:
    """Apply Mamba2 up to its norm. Arguments as those of `delta_step`; `gated`: apply the output gate."""
    _launch(
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
        shape,
        state,
        slots,
        positions,
        rows,
        tokens,
        out,
        delta=False,
        gated=gated,
    )


@dataclass(frozen=True, slots=True)
class StepTuning:
    """Tile size and warps of the decode kernel."""

    value_block: int  # rows of a matrix that a program holds at a time
    num_warps: int


@dataclass(frozen=True, slots=True)
class _StepForm:
    """A tuning for keys of 128. `fit_delta` and `fit_mamba`: programs per multiprocessor with an H200's registers."""

    value_block: int
    num_warps: int
    fit_delta: int
    fit_mamba: int


WIDE, LARGE, SMALL = _StepForm(16, 2, 7, 4), _StepForm(16, 1, 8, 8), _StepForm(8, 1, 14, 16)


def tune(num_programs: int, key_block: int, value_block: int, num_processors: int, delta: bool) -> StepTuning:
    """Choose by the number of programs per multiprocessor. Few: a whole head per program, the shortest path from first
    load to last store. More: the form with which all programs run at once, or in two full waves, since a partial last
    wave leaves memory idle. Many: small programs, which keep most of the state in flight."""
    per_processor = num_programs / num_processors
    if per_processor < FEW_PROGRAMS:
        return StepTuning(value_block, min(16, max(1, key_block * value_block // 1024)))
    fits = {form: form.fit_delta if delta else form.fit_mamba for form in (WIDE, LARGE, SMALL)}
    form = next((form for form, fit in fits.items() if per_processor <= fit), SMALL)
    if fits[SMALL] < per_processor <= 2 * fits[LARGE]:
        form = LARGE
    warps = key_block * form.num_warps // 128
    return StepTuning(min(value_block, form.value_block), min(16, max(1, warps)))


def _launch(
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
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor | None,
    tokens: Tensor | None,
    out: Tensor,
    *,
    delta: bool,
    gated: bool,
) -> None:
    num_rows = slots.shape[0] if rows is None else rows.shape[0]
    key_block, value_block = triton.next_power_of_2(shape.key_dim), triton.next_power_of_2(shape.value_dim)
    num_processors = num_multiprocessors(x.device.index)
    tuning = tune(num_rows * shape.num_heads, key_block, value_block, num_processors, delta)
    _step_kernel[(num_rows, shape.num_heads)](
        x,
        conv,
        conv_bias,
        a_log,
        dt_bias,
        skip,
        norm,
        state,
        out,
        slots,
        positions,
        rows,
        tokens,
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
        VALUE_BLOCK=tuning.value_block,
        NUM_BLOCKS=value_block // tuning.value_block,
        DELTA=delta,
        BETA_TOP=shape.beta_top,
        GATED=gated,
        BIAS=conv_bias is not None,
        INDEXED=rows is not None,
        **launch_options(x.device, tuning.num_warps),
    )
