"""Kimi Delta Attention for steps that mix decode and prefill rows: `channel_delta_net`.

Prefill has the stages of `recurrent.scan`: the convolution, the chunk-local part, the walk over chunks. A decay per
channel cannot be factored out of a sum over channels, so it is multiplied into keys and queries, and the products
between a chunk's tokens are computed by halves, with no exponent above 0: see `reference.recurrent.faded_products`.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor, float32

from quire.kernels.recurrent_types import DeltaWeights, RecurrentShape
from quire.kernels.triton.launch import dot_precision, launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.recurrent.channel_step import channel_step
from quire.kernels.triton.recurrent.conv import convolve_channels
from quire.kernels.triton.recurrent.recurrent import TritonRecurrentPlan, norm_tiles, prepare
from quire.kernels.triton.recurrent.scan import (
    chunk_tokens,
    invert_lower,
    load_row,
    processors,
    tune_walk,
    write_ring,
)
from quire.kernels.triton.recurrent.step import softplus

GATE_WARPS = 4
PREPARE_WARPS = 8  # keys, queries and sums of a chunk are all held in registers


@triton.jit
def _channel_gates_kernel(
    x_ptr,
    forget_ptr,
    a_log_ptr,
    dt_bias_ptr,
    totals_ptr,
    betas_ptr,
    tiles_ptr,
    x_stride,
    forget_stride,
    COLUMN: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BETA_TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the gates of one head of one chunk. Padding tokens have no decay and no beta, so change nothing."""
    let_next_start(PDL)
    head, tile = tl.program_id(0), tl.program_id(1)
    keys, n = tl.arange(0, KEY_BLOCK), tl.arange(0, CHUNK)
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head * KEY + keys, mask=keys < KEY, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    start = tl.load(tiles_ptr + 4 * tile + 2)
    tokens = tl.load(tiles_ptr + 4 * tile + 1).to(tl.int64) + start + n
    there = start + n < tl.load(tiles_ptr + 4 * tile + 3)
    inside = there[:, None] & (keys < KEY)[None, :]
    source = forget_ptr + tokens[:, None] * forget_stride + head * KEY + keys[None, :]
    step = softplus(tl.load(source, mask=inside, other=0.0).to(tl.float32) + dt_bias[None, :])
    total = tl.cumsum(tl.where(inside, -tl.exp(a_log) * step, 0.0), 0)  # [token, key]
    place = tile.to(tl.int64) * HEADS + head
    tl.store(totals_ptr + place * (CHUNK * KEY_BLOCK) + n[:, None] * KEY_BLOCK + keys[None, :], total)
    beta = tl.load(x_ptr + tokens * x_stride + COLUMN + head, mask=there, other=0.0).to(tl.float32)
    tl.store(betas_ptr + place * CHUNK + n, tl.where(there, BETA_TOP * tl.sigmoid(beta), 0.0))


@triton.jit
def _channel_prepare_kernel(
    keys_ptr,
    values_ptr,
    totals_ptr,
    betas_ptr,
    w_ptr,
    scores_ptr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: chunk-local part of one head of one chunk. Writes, in place of the values, what the tokens write
    into a zero state; in `w`, how an existing state changes that; and the scores, how much each token reads of what
    earlier ones wrote. Queries are scaled in place by the decay since the chunk's start, keys by the decay until its
    end."""
    let_next_start(PDL)
    FINE: tl.constexpr = tl.float32 if PRECISION == "ieee" else tl.float16  # all values are at most 1
    head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys, values, n = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK), tl.arange(0, CHUNK)
    in_keys = n[:, None] * KEY_BLOCK + keys[None, :]
    in_values = n[:, None] * VALUE_BLOCK + values[None, :]
    place = tile * HEADS + head
    q_ptr = keys_ptr + (tile * (2 * HEADS) + head) * (CHUNK * KEY_BLOCK)
    k_ptr = q_ptr + HEADS * CHUNK * KEY_BLOCK
    totals_ptr += place * (CHUNK * KEY_BLOCK)
    values_ptr += place * (CHUNK * VALUE_BLOCK)
    wait_for_inputs(PDL)
    total = tl.load(totals_ptr + in_keys)
    beta = tl.load(betas_ptr + place * CHUNK + n)
    q = tl.load(q_ptr + in_keys)
    k = tl.load(k_ptr + in_keys)
    dtype = k.dtype
    q, k = q.to(tl.float32), k.to(tl.float32)
    lower = tl.zeros((CHUNK, CHUNK), tl.float32)
    scores = tl.where(n[:, None] == n[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    for level in range(LEVELS):  # not unrolled: the inputs of several levels exceed the registers
        block, second = n >> (level + 1), ((n >> level) & 1) == 1
        middle = (block << (level + 1)) + (1 << level) - 1  # last token of the first half
        since = total - tl.load(totals_ptr + middle[:, None] * KEY_BLOCK + keys[None, :])
        fade = tl.exp(tl.where(second[:, None], since, -since))
        right = (k * fade).to(FINE)
        parted = (block[:, None] == block[None, :]) & second[:, None] & (second[None, :] == 0)
        lower += tl.where(parted, tl.dot(right, tl.trans(right), input_precision=PRECISION), 0.0)
        left = (q * fade).to(FINE)
        scores += tl.where(parted, tl.dot(left, tl.trans(right), input_precision=PRECISION), 0.0)
    tl.store(scores_ptr + place * (CHUNK * CHUNK) + n[:, None] * CHUNK + n[None, :], scores.to(dtype))
    inverse = invert_lower(lower * beta[:, None], CHUNK, LEVELS, PRECISION).to(dtype)
    fade = tl.exp(total)
    w = tl.dot(inverse, (k * fade * beta[:, None]).to(dtype), input_precision=PRECISION)
    tl.store(w_ptr + place * (CHUNK * KEY_BLOCK) + in_keys, w.to(dtype))
    tl.store(q_ptr + in_keys, (q * fade).to(dtype))
    last = tl.load(totals_ptr + (CHUNK - 1) * KEY_BLOCK + keys)
    tl.store(k_ptr + in_keys, (k * tl.exp(last[None, :] - total)).to(dtype))
    v = tl.load(values_ptr + in_values)
    u = tl.dot(inverse, (v.to(tl.float32) * beta[:, None]).to(dtype), input_precision=PRECISION)
    tl.store(values_ptr + in_values, u.to(dtype))


@triton.jit
def _channel_walk_kernel(
    x_ptr,
    keys_ptr,
    values_ptr,
    totals_ptr,
    w_ptr,
    scores_ptr,
    state_ptr,
    out_ptr,
    slots_ptr,
    positions_ptr,
    rows_ptr,
    x_stride,
    slot_stride,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: VALUE_BLOCK rows of one head's matrix, over all chunks of one row of the step."""
    let_next_start(PDL)
    BLOCKS: tl.constexpr = (VALUE + VALUE_BLOCK - 1) // VALUE_BLOCK
    CHANNELS: tl.constexpr = HEADS * (VALUE + 2 * KEY)
    K: tl.constexpr = HEADS * CHUNK * KEY_BLOCK  # keys follow the queries
    head, block, item = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    keys, n = tl.arange(0, KEY_BLOCK), tl.arange(0, CHUNK)
    values = block * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    in_keys = n[:, None] * KEY_BLOCK + keys[None, :]
    in_values = n[:, None] * VALUES + values[None, :]
    in_scores = n[:, None] * CHUNK + n[None, :]
    wait_for_inputs(PDL)
    slot, first, count, first_tile = load_row(rows_ptr, slots_ptr, item)
    state_ptr += slot * slot_stride
    matrix_ptr = state_ptr + head * (VALUE * KEY) + values[:, None] * KEY + keys[None, :]
    in_matrix = (values < VALUE)[:, None] & (keys < KEY)[None, :]
    matrix = tl.load(matrix_ptr, mask=in_matrix, other=0.0)  # [value, key]
    place = first_tile * HEADS + head
    keys_ptr += (first_tile * (2 * HEADS) + head) * (CHUNK * KEY_BLOCK)
    values_ptr += place * (CHUNK * VALUES)
    totals_ptr += place * (CHUNK * KEY_BLOCK) + (CHUNK - 1) * KEY_BLOCK
    w_ptr += place * (CHUNK * KEY_BLOCK)
    scores_ptr += place * (CHUNK * CHUNK)
    out_ptr += first * (HEADS * VALUE) + head * VALUE
    for chunk in range(tl.cdiv(count, CHUNK)):
        q = tl.load(keys_ptr + chunk * (2 * HEADS * CHUNK * KEY_BLOCK) + in_keys)
        k = tl.load(keys_ptr + chunk * (2 * HEADS * CHUNK * KEY_BLOCK) + K + in_keys)
        u = tl.load(values_ptr + chunk * (HEADS * CHUNK * VALUES) + in_values).to(tl.float32)
        w = tl.load(w_ptr + chunk * (HEADS * CHUNK * KEY_BLOCK) + in_keys)
        scores = tl.load(scores_ptr + chunk * (HEADS * CHUNK * CHUNK) + in_scores)
        last = tl.load(totals_ptr + chunk * (HEADS * CHUNK * KEY_BLOCK) + keys)
        old = tl.trans(matrix).to(k.dtype)  # [key, value]
        update = (u - tl.dot(w, old, input_precision=PRECISION)).to(k.dtype)
        out = tl.dot(q, old, input_precision=PRECISION)
        matrix = matrix * tl.exp(last)[None, :] + tl.dot(tl.trans(update), k, input_precision=PRECISION)
        out += tl.dot(scores, update, input_precision=PRECISION)
        tokens = (chunk * CHUNK + n)[:, None]
        inside = (tokens < count) & (values < VALUE)[None, :]
        tl.store(out_ptr + tokens * (HEADS * VALUE) + values[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(matrix_ptr, matrix, mask=in_matrix)
    start = tl.load(positions_ptr + first)
    ring_ptr = state_ptr + HEADS * VALUE * KEY
    write_ring(
        x_ptr,
        x_stride,
        ring_ptr,
        first,
        count,
        start,
        0,
        2 * HEADS * KEY + head * VALUE + values,
        values < VALUE,
        CHANNELS,
        TAPS,
    )
    if block == 0:
        for part in tl.static_range(2):
            channels = (part * HEADS + head) * KEY + keys
            write_ring(x_ptr, x_stride, ring_ptr, first, count, start, 0, channels, keys < KEY, CHANNELS, TAPS)


# ---------------------------------------------------------------------------------------------------------------------
# Launching


def channel_delta_net(
    x: Tensor,
    forget: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    plan: TritonRecurrentPlan,
) -> Tensor:
    """Implements `reference.recurrent.channel_delta_net`."""
    return run_channel_delta(x, forget, gate, weights, shape, state, plan, scan)


def run_channel_delta(
    x: Tensor,
    forget: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    plan: TritonRecurrentPlan,
    scan: Callable[..., None],
) -> Tensor:
    """Apply the layer. `scan` computes the prefill rows, with the arguments of `scan` of this module."""
    assert shape.num_groups == shape.num_heads
    work = prepare(plan, chunk_tokens(shape, x.dtype))
    out = x.new_empty(len(x), shape.values)
    where = (shape, state, plan.slots, plan.positions)
    if work.rows is not None and work.tiles is not None:
        scan(x, forget, gate, weights, *where, work.rows, work.tiles, out, work.chunk)
    if work.num_decodes:
        channel_step(x, forget, gate, weights, *where, work.decodes, work.decode_tokens, out)
    return out


def scan(
    x: Tensor,
    forget: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    tiles: Tensor,
    out: Tensor,
    chunk: int,
) -> None:
    """Compute the prefill rows `rows` [items, 4] int32 (row, first token, count, first chunk), whose chunks `tiles`
    [tiles, 4] int32 lists (row, first token, offset, count), into `out` [tokens, values], norm and gate included."""
    heads, num_tiles, precision = shape.num_heads, len(tiles), dot_precision(x.dtype)
    keys, values = convolve_channels(x, weights.conv, None, shape, state, slots, positions, tiles, chunk, delta=True)
    key_block, all_values = keys.shape[-1], values.shape[-1]
    totals = x.new_empty(num_tiles, heads, chunk, key_block, dtype=float32)
    betas = x.new_empty(num_tiles, heads, chunk, dtype=float32)
    _channel_gates_kernel[(heads, num_tiles)](
        x,
        forget,
        weights.a_log,
        weights.dt_bias,
        totals,
        betas,
        tiles,
        x.stride(0),
        forget.stride(0),
        COLUMN=shape.channels,
        HEADS=heads,
        KEY=shape.key_dim,
        KEY_BLOCK=key_block,
        CHUNK=chunk,
        BETA_TOP=shape.beta_top,
        **launch_options(x.device, GATE_WARPS),
    )
    w, scores = x.new_empty(num_tiles, heads, chunk, key_block), x.new_empty(num_tiles, heads, chunk, chunk)
    _channel_prepare_kernel[(heads, num_tiles)](
        keys,
        values,
        totals,
        betas,
        w,
        scores,
        HEADS=heads,
        CHUNK=chunk,
        LEVELS=chunk.bit_length() - 1,
        KEY_BLOCK=key_block,
        VALUE_BLOCK=all_values,
        PRECISION=precision,
        **launch_options(x.device, PREPARE_WARPS),
    )
    value_block, num_warps, num_stages = tune_walk(
        len(rows) * heads, shape, chunk, x.element_size(), True, processors(x)
    )
    _channel_walk_kernel[(heads * triton.cdiv(shape.value_dim, value_block), len(rows))](
        x,
        keys,
        values,
        totals,
        w,
        scores,
        state,
        out,
        slots,
        positions,
        rows,
        x.stride(0),
        state.stride(0),
        HEADS=heads,
        KEY=shape.key_dim,
        VALUE=shape.value_dim,
        TAPS=shape.conv_len,
        CHUNK=chunk,
        KEY_BLOCK=key_block,
        VALUES=all_values,
        VALUE_BLOCK=value_block,
        PRECISION=precision,
        **launch_options(x.device, num_warps, num_stages),
    )
    norm_tiles(out, gate, 0, weights, shape, tiles, chunk, use_silu=False)
