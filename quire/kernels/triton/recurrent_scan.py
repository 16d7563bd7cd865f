"""Rows that catch up, chunk by chunk: the convolution, then what chunks can work out alone, then the walk over them.

With S a head's matrix at a chunk's start and G the running sum of its decays, what the chunk's tokens write is
U = T (beta V) - T (beta exp(G) K) S', where T is the inverse of a unit lower triangular matrix (see
`reference_recurrent`). T knows nothing of S, so all chunks of all rows make their two products at once, and their
scores; the walk from chunk to chunk is left with plain matrix products. Mamba2 has no T: what it writes is there from
the start.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrent import DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.triton.launch import (
    INTERPRETED,
    dot_precision,
    launch_options,
    let_next_start,
    num_multiprocessors,
    wait_for_inputs,
)
from quire.kernels.triton.recurrent_step import L2_EPS, silu, softplus

CHUNK = 64  # tokens
CONV_TOKENS = 32  # a convolution's tile: half a chunk, which is what fits into the registers
PREPARE_WARPS = 4
CHIP_BYTES = 220_000  # of a multiprocessor's shared memory
# Rows of a matrix that a program of the walk takes. With 16 or 32, products of 64 tokens read memory that
# is not theirs on Hopper (Triton 3.6; products of 32 tokens are right).
MIN_VALUES = 64


@triton.jit
def _conv_kernel(
    x_ptr, conv_ptr, conv_bias_ptr, state_ptr, mixed_ptr, slots_ptr, positions_ptr, tiles_ptr, x_stride, slot_stride,
    query_scale, FIRST: tl.constexpr,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, DELTA: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: part of a tile of one row's tokens through the convolution, for one group's queries or keys or for
    WIDTH channels of the values; queries and keys are normed on the way where the delta rule wants it."""
    let_next_start(PDL)
    tile, unit = tl.program_id(0), tl.program_id(1)
    VALUES: tl.constexpr = HEADS * VALUE
    CHANNELS: tl.constexpr = VALUES + 2 * GROUPS * KEY
    NUM_VALUES: tl.constexpr = (VALUES + WIDTH - 1) // WIDTH
    if DELTA:
        is_key = unit < 2 * GROUPS
        is_query = unit < GROUPS
        channel = tl.where(is_key, unit * KEY, 2 * GROUPS * KEY + (unit - 2 * GROUPS) * WIDTH)
        end = tl.where(is_key, channel + KEY, CHANNELS)
    else:
        is_key = unit >= NUM_VALUES
        is_query = False
        channel = tl.where(is_key, VALUES + (unit - NUM_VALUES) * KEY, unit * WIDTH)
        end = tl.where(is_key, channel + KEY, VALUES)
    columns = tl.arange(0, WIDTH)
    channels = (channel + columns)[None, :]
    # A comparison with a number known only at run time would make the compiler load element by element.
    wanted = tl.full((1, WIDTH), True, tl.int1)
    if KEY != WIDTH or VALUES % WIDTH != 0:
        wanted = channels < end
    wait_for_inputs(PDL)
    row, first = tl.load(tiles_ptr + 4 * tile), tl.load(tiles_ptr + 4 * tile + 1).to(tl.int64)
    offset, count = tl.load(tiles_ptr + 4 * tile + 2), tl.load(tiles_ptr + 4 * tile + 3)
    offset += tl.program_id(2) * TOKENS
    places = (offset + tl.arange(0, TOKENS))[:, None]
    inside = (places < count) & wanted
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    for age in tl.static_range(0, TAPS):
        before = places - age
        x = tl.load(x_ptr + (first + before) * x_stride + FIRST + channels, mask=inside & (before >= 0), other=0.0)
        tap = tl.load(conv_ptr + (TAPS - 1 - age) * CHANNELS + channels, mask=wanted, other=0.0)
        total += x.to(tl.float32) * tap.to(tl.float32)
    if offset == 0:  # the row's first tokens look back into the ring
        start = tl.load(positions_ptr + first)
        ring_ptr = state_ptr + tl.load(slots_ptr + row) * slot_stride + HEADS * VALUE * KEY
        for age in tl.static_range(1, TAPS):
            before = places - age
            entry = (start + before + TAPS) % TAPS
            kept = tl.load(ring_ptr + entry * CHANNELS + channels, mask=inside & (before < 0), other=0.0)
            tap = tl.load(conv_ptr + (TAPS - 1 - age) * CHANNELS + channels, mask=wanted, other=0.0)
            total += kept * tap.to(tl.float32)
    if BIAS:
        total += tl.load(conv_bias_ptr + channels, mask=wanted, other=0.0).to(tl.float32)
    total = silu(total)
    if DELTA:
        scale = tl.rsqrt(tl.sum(tl.where(wanted, total * total, 0.0), 1) + L2_EPS)
        scale = tl.where(is_key, scale * tl.where(is_query, query_scale, 1.0), 1.0)
        total *= scale[:, None]
    target = mixed_ptr + (first + places) * CHANNELS + channels
    tl.store(target, total.to(mixed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _decay(x_ptr, x_stride, tokens, valid, column, a_log, dt_bias, dt_low, dt_high, DELTA: tl.constexpr):
    """The time step and the logarithm of the decay of these tokens; 0 for those that are not there."""
    dt = softplus(tl.load(x_ptr + tokens * x_stride + column, mask=valid, other=0.0).to(tl.float32) + dt_bias)
    if not DELTA:
        dt = tl.minimum(tl.maximum(dt, dt_low), dt_high)
    dt = tl.where(valid, dt, 0.0)
    return dt, -tl.exp(a_log) * dt


@triton.jit
def _invert(lower, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + `lower`, which is strictly lower triangular, [SIZE, SIZE] float32.

    By halves: where the inverses D of the diagonal's blocks of some size are there, those of blocks twice as large are
    D - D N D, with N what `lower` has below the diagonal inside the larger blocks. Powers of `lower` itself would take
    fewer products, but grow without bound where keys resemble each other, and with them the error."""
    FINE: tl.constexpr = tl.float32 if PRECISION == "ieee" else tl.float16  # all of it is small; ten bits, as tf32 has
    n = tl.arange(0, SIZE)
    rows, columns = n[:, None], n[None, :]
    pairs = tl.where(rows >> 1 == columns >> 1, lower, 0.0)
    inverse = tl.where(rows == columns, 1.0, 0.0) - pairs
    for level in tl.static_range(1, LEVELS):
        below = (rows >> (level + 1) == columns >> (level + 1)) & (rows >> level > columns >> level)
        inner = tl.dot(inverse.to(FINE), tl.where(below, lower, 0.0).to(FINE), input_precision=PRECISION)
        inverse -= tl.dot(inner.to(FINE), inverse.to(FINE), input_precision=PRECISION)
    return inverse


@triton.jit
def _prepare_kernel(
    x_ptr, mixed_ptr, a_log_ptr, dt_bias_ptr, w_ptr, u_ptr, scores_ptr, tiles_ptr, x_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TOKENS: tl.constexpr,
    LEVELS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one head of one chunk. What its tokens write into a state of zeros, how a state changes that, and
    how much each token reads of what the others wrote."""
    let_next_start(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    CHANNELS: tl.constexpr = HEADS * VALUE + 2 * GROUPS * KEY
    group = head // (HEADS // GROUPS)
    a_log, dt_bias = tl.load(a_log_ptr + head).to(tl.float32), tl.load(dt_bias_ptr + head).to(tl.float32)
    keys, values, n = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK), tl.arange(0, TOKENS)
    wait_for_inputs(PDL)
    first = tl.load(tiles_ptr + 4 * tile + 1).to(tl.int64) + tl.load(tiles_ptr + 4 * tile + 2)
    valid = n < tl.load(tiles_ptr + 4 * tile + 3) - tl.load(tiles_ptr + 4 * tile + 2)
    tokens = first + n
    in_key = valid[:, None] & (keys < KEY)[None, :]
    in_value = valid[:, None] & (values < VALUE)[None, :]
    mixed_ptr += tokens[:, None] * CHANNELS
    k = tl.load(mixed_ptr + (GROUPS + group) * KEY + keys[None, :], mask=in_key, other=0.0)
    column = CHANNELS + HEADS * VALUE + head
    beta = tl.sigmoid(tl.load(x_ptr + tokens * x_stride + column, mask=valid, other=0.0).to(tl.float32))
    _, decay = _decay(x_ptr, x_stride, tokens, valid, column + HEADS, a_log, dt_bias, 0.0, 0.0, True)
    total = tl.cumsum(decay, 0)
    place = (tokens * HEADS + head)[:, None]
    between = tl.exp(tl.where(n[:, None] >= n[None, :], total[:, None] - total[None, :], -1e30))
    q = tl.load(mixed_ptr + group * KEY + keys[None, :], mask=in_key, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
    tl.store(scores_ptr + place * TOKENS + n[None, :], scores.to(scores_ptr.dtype.element_ty), mask=valid[:, None])
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    lower = tl.where(n[:, None] > n[None, :], products * between * beta[:, None], 0.0)
    inverse = _invert(lower, TOKENS, LEVELS, PRECISION).to(k.dtype)
    faded = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(k.dtype)
    w = tl.dot(inverse, faded, input_precision=PRECISION)
    v = tl.load(mixed_ptr + 2 * GROUPS * KEY + head * VALUE + values[None, :], mask=in_value, other=0.0)
    u = tl.dot(inverse, (v.to(tl.float32) * beta[:, None]).to(v.dtype), input_precision=PRECISION)
    tl.store(w_ptr + place * KEY + keys[None, :], w.to(w_ptr.dtype.element_ty), mask=in_key)
    tl.store(u_ptr + place * VALUE + values[None, :], u.to(u_ptr.dtype.element_ty), mask=in_value)


@triton.jit
def _write_ring(x_ptr, x_stride, ring_ptr, first, count, start, column, channels, inside, CHANNELS: tl.constexpr,
                TAPS: tl.constexpr):  # fmt: skip
    """The last inputs of these channels, for the next step's convolution."""
    for age in tl.static_range(0, TAPS):
        place = count - 1 - age
        if place >= 0:
            x = tl.load(x_ptr + (first + place) * x_stride + column + channels, mask=inside, other=0.0)
            tl.store(ring_ptr + ((start + place) % TAPS) * CHANNELS + channels, x.to(tl.float32), mask=inside)


@triton.jit
def _scan_kernel(
    x_ptr, mixed_ptr, w_ptr, u_ptr, scores_ptr, a_log_ptr, dt_bias_ptr, skip_ptr, state_ptr, out_ptr, slots_ptr,
    positions_ptr, rows_ptr, x_stride, slot_stride, dt_low, dt_high,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: VALUE_BLOCK rows of one head's matrix, over all chunks of one row of the step."""
    let_next_start(PDL)
    BLOCKS: tl.constexpr = (VALUE + VALUE_BLOCK - 1) // VALUE_BLOCK
    CHANNELS: tl.constexpr = HEADS * VALUE + 2 * GROUPS * KEY
    head, block, item = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    group = head // (HEADS // GROUPS)
    a_log, dt_bias = tl.load(a_log_ptr + head).to(tl.float32), tl.load(dt_bias_ptr + head).to(tl.float32)
    keys, n = tl.arange(0, KEY_BLOCK), tl.arange(0, TOKENS)
    values = block * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    Q: tl.constexpr = 0 if DELTA else HEADS * VALUE + GROUPS * KEY
    K: tl.constexpr = GROUPS * KEY if DELTA else HEADS * VALUE
    V: tl.constexpr = 2 * GROUPS * KEY if DELTA else 0
    MIXED: tl.constexpr = 0 if DELTA else HEADS * VALUE
    DT: tl.constexpr = CHANNELS + HEADS * VALUE + (HEADS if DELTA else 0)
    if not DELTA:
        skip = tl.load(skip_ptr + head).to(tl.float32)
    wait_for_inputs(PDL)
    row, first = tl.load(rows_ptr + 3 * item), tl.load(rows_ptr + 3 * item + 1).to(tl.int64)
    count = tl.load(rows_ptr + 3 * item + 2)
    state_ptr += tl.load(slots_ptr + row) * slot_stride
    matrix_ptr = state_ptr + head * (VALUE * KEY) + values[:, None] * KEY + keys[None, :]
    in_matrix = (values < VALUE)[:, None] & (keys < KEY)[None, :]
    matrix = tl.load(matrix_ptr, mask=in_matrix, other=0.0)  # [value, key]
    for offset in range(0, count, TOKENS):
        valid = offset + n < count
        tokens = first + offset + n
        in_key, in_value = valid[:, None] & (keys < KEY)[None, :], valid[:, None] & (values < VALUE)[None, :]
        source = mixed_ptr + tokens[:, None] * CHANNELS
        q = tl.load(source + Q + group * KEY + keys[None, :], mask=in_key, other=0.0)
        k = tl.load(source + K + group * KEY + keys[None, :], mask=in_key, other=0.0)
        dt, decay = _decay(x_ptr, x_stride, tokens, valid, DT + head, a_log, dt_bias, dt_low, dt_high, DELTA)
        total = tl.cumsum(decay, 0)
        last = tl.sum(decay, 0)
        old = tl.trans(matrix).to(k.dtype)  # [key, value]
        if DELTA:
            place = (tokens * HEADS + head)[:, None]
            w = tl.load(w_ptr + place * KEY + keys[None, :], mask=in_key, other=0.0)
            update = tl.load(u_ptr + place * VALUE + values[None, :], mask=in_value, other=0.0).to(tl.float32)
            update -= tl.dot(w, old, input_precision=PRECISION)
            scores = tl.load(scores_ptr + place * TOKENS + n[None, :], mask=valid[:, None], other=0.0)
        else:
            v = tl.load(source + V + head * VALUE + values[None, :], mask=in_value, other=0.0).to(tl.float32)
            update = v * dt[:, None]
            between = tl.exp(tl.where(n[:, None] >= n[None, :], total[:, None] - total[None, :], -1e30))
            scores = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * between).to(k.dtype)
        out = tl.dot(q, old, input_precision=PRECISION) * tl.exp(total)[:, None]
        out += tl.dot(scores, update.to(k.dtype), input_precision=PRECISION)
        if not DELTA:
            out += v * skip
        target = out_ptr + tokens[:, None] * (HEADS * VALUE) + head * VALUE + values[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=in_value)
        left = (update * tl.exp(last - total)[:, None]).to(k.dtype)
        matrix = matrix * tl.exp(last) + tl.dot(tl.trans(left), k, input_precision=PRECISION)
    tl.store(matrix_ptr, matrix, mask=in_matrix)
    start = tl.load(positions_ptr + first)
    ring_ptr = state_ptr + HEADS * VALUE * KEY
    _write_ring(x_ptr, x_stride, ring_ptr, first, count, start, MIXED, V + head * VALUE + values, values < VALUE,
                CHANNELS, TAPS)  # fmt: skip
    if (block == 0) & (head % (HEADS // GROUPS) == 0):
        for base in tl.static_range(2):
            channels = (K if base == 0 else Q) + group * KEY + keys
            _write_ring(x_ptr, x_stride, ring_ptr, first, count, start, MIXED, channels, keys < KEY, CHANNELS, TAPS)


def delta_scan(x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, slots: Tensor,
               positions: Tensor, rows: Tensor, tiles: Tensor, out: Tensor, chunk: int) -> None:  # fmt: skip
    """The delta rule over the rows of `rows` [items, 3] int32 (row, first token, count), whose chunks `tiles` [tiles,
    4] int32 lists (row, first token, offset, count), into `out` [tokens, values], before norm and gate."""
    mixed = _convolve(x, weights.conv, None, shape, state, slots, positions, tiles, chunk, delta=True)
    num_tokens, heads = len(x), shape.num_heads
    # w, u and scores, as the kernel calls them
    alone = tuple(x.new_empty(num_tokens, heads, dim) for dim in (shape.key_dim, shape.value_dim, chunk))
    _prepare_kernel[(len(tiles), heads)](
        x, mixed, weights.a_log, weights.dt_bias, *alone, tiles, x.stride(0), HEADS=heads, GROUPS=shape.num_groups,
        KEY=shape.key_dim, VALUE=shape.value_dim, TOKENS=chunk, LEVELS=chunk.bit_length() - 1,
        KEY_BLOCK=_block(shape.key_dim), VALUE_BLOCK=_block(shape.value_dim), PRECISION=dot_precision(x.dtype),
        **launch_options(x.device, PREPARE_WARPS),
    )  # fmt: skip
    _walk(x, mixed, alone, weights.a_log, weights.dt_bias, None, 0.0, 0.0, shape, state, slots, positions, rows, out,
          chunk)  # fmt: skip


def mamba_scan(x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor, slots: Tensor,
               positions: Tensor, rows: Tensor, tiles: Tensor, out: Tensor, chunk: int) -> None:  # fmt: skip
    """Mamba2's recurrence and skip, likewise."""
    mixed = _convolve(x, weights.conv, weights.conv_bias, shape, state, slots, positions, tiles, chunk, delta=False)
    _walk(x, mixed, None, weights.a_log, weights.dt_bias, weights.skip, weights.dt_low, weights.dt_high, shape,
          state, slots, positions, rows, out, chunk)  # fmt: skip


def _convolve(x: Tensor, conv: Tensor, bias: Tensor | None, shape: RecurrentShape, state: Tensor, slots: Tensor,
              positions: Tensor, tiles: Tensor, chunk: int, *, delta: bool) -> Tensor:  # fmt: skip
    """[tokens, channels], queries and keys normed for the delta rule. The rings stay as they are."""
    mixed = x.new_empty(len(x), shape.channels)
    conv = conv.view(shape.channels, shape.conv_len).t().contiguous()  # so that a thread's channels lie side by side
    width = _block(shape.key_dim)
    units = triton.cdiv(shape.values, width) + 2 * shape.num_groups
    _conv_kernel[(len(tiles), units, chunk // CONV_TOKENS)](
        x, conv, bias, state, mixed, slots, positions, tiles, x.stride(0), state.stride(0), shape.key_dim**-0.5,
        FIRST=0 if delta else shape.values, HEADS=shape.num_heads, GROUPS=shape.num_groups, KEY=shape.key_dim,
        VALUE=shape.value_dim, TAPS=shape.conv_len, TOKENS=CONV_TOKENS, WIDTH=width, DELTA=delta,
        BIAS=bias is not None, **launch_options(x.device, 4),
    )  # fmt: skip
    return mixed


def _walk(x: Tensor, mixed: Tensor, alone: tuple[Tensor, ...] | None, a_log: Tensor, dt_bias: Tensor,
          skip: Tensor | None, dt_low: float, dt_high: float, shape: RecurrentShape, state: Tensor, slots: Tensor,
          positions: Tensor, rows: Tensor, out: Tensor, chunk: int) -> None:  # fmt: skip
    """`alone`: what chunks worked out without the state; None: there is no delta rule."""
    value_block, num_warps, num_stages = tune_walk(
        len(rows) * shape.num_heads, shape, chunk, x.element_size(), alone is not None, _processors(x)
    )
    blocks = triton.cdiv(shape.value_dim, value_block)
    _scan_kernel[(shape.num_heads * blocks, len(rows))](
        x, mixed, *(alone or (None,) * 3), a_log, dt_bias, skip, state, out, slots, positions, rows, x.stride(0),
        state.stride(0), dt_low, dt_high, HEADS=shape.num_heads, GROUPS=shape.num_groups, KEY=shape.key_dim,
        VALUE=shape.value_dim, TAPS=shape.conv_len, TOKENS=chunk, KEY_BLOCK=_block(shape.key_dim),
        VALUE_BLOCK=value_block, DELTA=alone is not None, PRECISION=dot_precision(x.dtype),
        **launch_options(x.device, num_warps, num_stages),
    )  # fmt: skip


def tune_walk(num_matrices: int, shape: RecurrentShape, chunk: int, element_size: int, delta: bool, num_processors: int
              ) -> tuple[int, int, int]:  # fmt: skip
    """Rows of a matrix a program takes, warps, and chunks on the way into the chip: none where several programs share
    a multiprocessor and wait for each other's anyway."""
    key_block, value_block = _block(shape.key_dim), min(_block(shape.value_dim), MIN_VALUES)
    chunk_bytes = element_size * chunk * ((3 if delta else 2) * key_block + value_block + (chunk if delta else 0))
    if num_matrices * _block(shape.value_dim) // value_block >= 2 * num_processors:
        return value_block, 4, 1
    return value_block, 4, max(1, min(3, (CHIP_BYTES - element_size * value_block * key_block) // chunk_bytes))


def _processors(x: Tensor) -> int:
    return 1 if INTERPRETED else num_multiprocessors(x.device.index)


def _block(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def chunk_tokens(dtype: torch.dtype) -> int:
    """float32 needs twice the room on the chip, and is for checking only."""
    return CHUNK if dtype != torch.float32 else 32
