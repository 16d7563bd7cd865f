"""Chunked prefill of recurrent layers: the convolution, the chunk-local part, then the walk over chunks.

With S a head's matrix at a chunk's start and G the running sum of its log decays, the chunk's tokens write
U = T (beta V) - T (beta exp(G) K) S', where T is the inverse of a unit lower triangular matrix (see
`reference.recurrent`). T does not depend on S, so both products and the scores are computed for all chunks of all rows
at once; the walk from chunk to chunk consists of plain matrix products. Mamba2 has no T: what its tokens write does not
depend on the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.recurrent_types import DeltaWeights, MambaWeights, RecurrentShape
from quire.kernels.triton.launch import (
    INTERPRETED,
    dot_precision,
    launch_options,
    let_next_start,
    num_multiprocessors,
    wait_for_inputs,
)
from quire.kernels.triton.recurrent.conv import ConvolvedChunks, block, convolve
from quire.kernels.triton.recurrent.step import silu

CHUNK, SMALL_CHUNK = 64, 32  # tokens
PREPARE_WARPS = 4
SHARED_MEMORY_BYTES = 220_000  # of a multiprocessor's shared memory
# Minimum columns of products of 64 tokens: with 16 or 32 columns they read out of bounds on Hopper (Triton 3.6), while
# products of 32 tokens are correct.
MIN_COLUMNS = 64


@triton.jit
def invert_lower(lower, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + `lower`, which is strictly lower triangular, [SIZE, SIZE] float32.

    By halves: given the inverses D of diagonal blocks of one size, those of blocks twice as large are D - D N D, with N
    the entries of `lower` below the diagonal blocks and inside the larger ones. Powers of `lower` would take fewer
    products, but grow without bound where keys resemble each other, and the error grows with them."""
    FINE: tl.constexpr = tl.float32 if PRECISION == "ieee" else tl.float16  # ten bits, as tf32; entries are small
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
def _solve(q, k, total, beta, scores_ptr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Store the scores (how much each token reads of what others wrote) and return T of one head of a chunk, in the
    keys' type."""
    n = tl.arange(0, CHUNK)
    between = tl.exp(tl.where(n[:, None] >= n[None, :], total[:, None] - total[None, :], -1e30))
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    lower = tl.where(n[:, None] > n[None, :], products * between * beta[:, None], 0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
    tl.store(scores_ptr + n[:, None] * CHUNK + n[None, :], scores.to(k.dtype))
    return invert_lower(lower, CHUNK, LEVELS, PRECISION).to(k.dtype)


@triton.jit
def _prepare_kernel(
    keys_ptr,
    values_ptr,
    gates_ptr,
    w_ptr,
    scores_ptr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: chunk-local part of one head of one chunk. Writes, in place of the values, what the tokens write
    into a zero state; in `w`, how an existing state changes that; and the scores."""
    let_next_start(PDL)
    head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys, values, n = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK), tl.arange(0, CHUNK)
    in_keys = n[:, None] * KEY_BLOCK + keys[None, :]
    in_values = n[:, None] * VALUE_BLOCK + values[None, :]
    q_ptr = keys_ptr + (tile * (2 * GROUPS) + head // (HEADS // GROUPS)) * (CHUNK * KEY_BLOCK)
    place = tile * HEADS + head
    values_ptr += place * (CHUNK * VALUE_BLOCK)
    wait_for_inputs(PDL)
    total = tl.load(gates_ptr + place * (2 * CHUNK) + n)
    beta = tl.load(gates_ptr + place * (2 * CHUNK) + CHUNK + n)
    k = tl.load(q_ptr + GROUPS * CHUNK * KEY_BLOCK + in_keys)
    q = tl.load(q_ptr + in_keys)
    v = tl.load(values_ptr + in_values)
    inverse = _solve(q, k, total, beta, scores_ptr + place * (CHUNK * CHUNK), CHUNK, LEVELS, PRECISION)
    faded = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(k.dtype)
    w = tl.dot(inverse, faded, input_precision=PRECISION)
    tl.store(w_ptr + place * (CHUNK * KEY_BLOCK) + in_keys, w.to(k.dtype))
    u = tl.dot(inverse, (v.to(tl.float32) * beta[:, None]).to(v.dtype), input_precision=PRECISION)
    tl.store(values_ptr + in_values, u.to(k.dtype))


@triton.jit
def load_row(rows_ptr, slots_ptr, item):
    """Slot, first token, number of tokens and first chunk of a prefill row."""
    row, first = tl.load(rows_ptr + 4 * item), tl.load(rows_ptr + 4 * item + 1).to(tl.int64)
    count, first_tile = tl.load(rows_ptr + 4 * item + 2), tl.load(rows_ptr + 4 * item + 3).to(tl.int64)
    return tl.load(slots_ptr + row), first, count, first_tile


@triton.jit
def write_ring(
    x_ptr, x_stride, ring_ptr, first, count, start, column, channels, inside, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    """Store the last inputs of these channels, for the next step's convolution."""
    for age in tl.static_range(0, TAPS):
        place = count - 1 - age
        if place >= 0:
            x = tl.load(x_ptr + (first + place) * x_stride + column + channels, mask=inside, other=0.0)
            tl.store(ring_ptr + ((start + place) % TAPS) * CHANNELS + channels, x.to(tl.float32), mask=inside)


@triton.jit
def _walk_kernel(
    x_ptr,
    keys_ptr,
    values_ptr,
    gates_ptr,
    w_ptr,
    scores_ptr,
    skip_ptr,
    state_ptr,
    out_ptr,
    slots_ptr,
    positions_ptr,
    rows_ptr,
    x_stride,
    slot_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    DELTA: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: VALUE_BLOCK rows of one head's matrix, over all chunks of one row of the step. GATED: apply Mamba2's
    output gate."""
    let_next_start(PDL)
    BLOCKS: tl.constexpr = (VALUE + VALUE_BLOCK - 1) // VALUE_BLOCK
    CHANNELS: tl.constexpr = HEADS * VALUE + 2 * GROUPS * KEY
    head, block, item = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    group = head // (HEADS // GROUPS)
    keys, n = tl.arange(0, KEY_BLOCK), tl.arange(0, CHUNK)
    values = block * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    Q: tl.constexpr = 0 if DELTA else GROUPS
    K: tl.constexpr = GROUPS if DELTA else 0
    in_keys = n[:, None] * KEY_BLOCK + keys[None, :]
    in_values = n[:, None] * VALUES + values[None, :]
    in_scores = n[:, None] * CHUNK + n[None, :]
    if not DELTA:
        skip = tl.load(skip_ptr + head).to(tl.float32)
    wait_for_inputs(PDL)
    slot, first, count, first_tile = load_row(rows_ptr, slots_ptr, item)
    state_ptr += slot * slot_stride
    matrix_ptr = state_ptr + head * (VALUE * KEY) + values[:, None] * KEY + keys[None, :]
    in_matrix = (values < VALUE)[:, None] & (keys < KEY)[None, :]
    matrix = tl.load(matrix_ptr, mask=in_matrix, other=0.0)  # [value, key]
    keys_ptr += (first_tile * (2 * GROUPS) + group) * (CHUNK * KEY_BLOCK)
    place = first_tile * HEADS + head
    values_ptr += place * (CHUNK * VALUES)
    gates_ptr += place * (2 * CHUNK)
    if DELTA:
        w_ptr += place * (CHUNK * KEY_BLOCK)
        scores_ptr += place * (CHUNK * CHUNK)
    out_ptr += first * (HEADS * VALUE) + head * VALUE
    for chunk in range(tl.cdiv(count, CHUNK)):
        q = tl.load(keys_ptr + chunk * (2 * GROUPS * CHUNK * KEY_BLOCK) + Q * CHUNK * KEY_BLOCK + in_keys)
        k = tl.load(keys_ptr + chunk * (2 * GROUPS * CHUNK * KEY_BLOCK) + K * CHUNK * KEY_BLOCK + in_keys)
        total = tl.load(gates_ptr + chunk * (HEADS * 2 * CHUNK) + n)
        last = tl.load(gates_ptr + chunk * (HEADS * 2 * CHUNK) + CHUNK - 1)
        v = tl.load(values_ptr + chunk * (HEADS * CHUNK * VALUES) + in_values).to(tl.float32)
        old = tl.trans(matrix).to(k.dtype)  # [key, value]
        if DELTA:
            w = tl.load(w_ptr + chunk * (HEADS * CHUNK * KEY_BLOCK) + in_keys)
            scores = tl.load(scores_ptr + chunk * (HEADS * CHUNK * CHUNK) + in_scores)
            update = v - tl.dot(w, old, input_precision=PRECISION)
        else:
            update = v * tl.load(gates_ptr + chunk * (HEADS * 2 * CHUNK) + CHUNK + n)[:, None]
            between = tl.exp(tl.where(n[:, None] >= n[None, :], total[:, None] - total[None, :], -1e30))
            scores = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * between).to(k.dtype)
        out = tl.dot(q, old, input_precision=PRECISION) * tl.exp(total)[:, None]
        left = (update * tl.exp(last - total)[:, None]).to(k.dtype)
        matrix = matrix * tl.exp(last) + tl.dot(tl.trans(left), k, input_precision=PRECISION)
        out += tl.dot(scores, update.to(k.dtype), input_precision=PRECISION)
        if not DELTA:
            out += v * skip
        tokens = (chunk * CHUNK + n)[:, None]
        inside = (tokens < count) & (values < VALUE)[None, :]
        if GATED:
            gate = x_ptr + (first + tokens) * x_stride + head * VALUE + values[None, :]
            out *= silu(tl.load(gate, mask=inside, other=0.0).to(tl.float32))
        tl.store(out_ptr + tokens * (HEADS * VALUE) + values[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(matrix_ptr, matrix, mask=in_matrix)
    start = tl.load(positions_ptr + first)
    ring_ptr = state_ptr + HEADS * VALUE * KEY
    MIXED: tl.constexpr = 0 if DELTA else HEADS * VALUE
    V: tl.constexpr = 2 * GROUPS * KEY if DELTA else 0
    write_ring(
        x_ptr, x_stride, ring_ptr, first, count, start, MIXED, V + head * VALUE + values, values < VALUE, CHANNELS, TAPS
    )
    if (block == 0) & (head % (HEADS // GROUPS) == 0):
        for part in tl.static_range(2):
            channels = (0 if DELTA else HEADS * VALUE) + (part * GROUPS + group) * KEY + keys
            write_ring(x_ptr, x_stride, ring_ptr, first, count, start, MIXED, channels, keys < KEY, CHANNELS, TAPS)


def delta_scan(
    x: Tensor,
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
    """Apply the delta rule to the prefill rows `rows` [items, 4] int32 (row, first token, count, first chunk), whose
    chunks are listed in `tiles` [tiles, 4] int32 (row, first token, offset, count), into `out` [tokens, values], before
    norm and gate."""
    chunks = convolve(
        x,
        weights.conv,
        None,
        weights.a_log,
        weights.dt_bias,
        0.0,
        0.0,
        shape,
        state,
        slots,
        positions,
        tiles,
        chunk,
        delta=True,
    )
    _walk(x, chunks, prepare_chunks(chunks, shape), None, False, shape, state, slots, positions, rows, out)


def prepare_chunks(chunks: ConvolvedChunks, shape: RecurrentShape) -> tuple[Tensor, Tensor]:
    """Compute the chunk-local part of the delta rule. Overwrites the chunks' values with what they write into a zero
    state. Returns how a state changes that, [chunks, heads, chunk, key_block], and the scores, [chunks, heads, chunk,
    chunk]."""
    keys, heads = chunks.keys, shape.num_heads
    num_tiles, _, chunk, key_block = keys.shape
    prepared = keys.new_empty(num_tiles, heads, chunk, key_block), keys.new_empty(num_tiles, heads, chunk, chunk)
    _prepare_kernel[(heads, num_tiles)](
        keys,
        chunks.values,
        chunks.gates,
        *prepared,
        HEADS=heads,
        GROUPS=shape.num_groups,
        CHUNK=chunk,
        LEVELS=chunk.bit_length() - 1,
        KEY_BLOCK=key_block,
        VALUE_BLOCK=chunks.values.shape[-1],
        PRECISION=dot_precision(keys.dtype),
        **launch_options(keys.device, PREPARE_WARPS),
    )
    return prepared


def mamba_scan(
    x: Tensor,
    weights: MambaWeights,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    tiles: Tensor,
    out: Tensor,
    chunk: int,
    *,
    gated: bool,
) -> None:
    """Apply Mamba2's recurrence and skip; arguments as those of `delta_scan`. `gated`: apply the output gate too."""
    chunks = convolve(
        x,
        weights.conv,
        weights.conv_bias,
        weights.a_log,
        weights.dt_bias,
        weights.dt_low,
        weights.dt_high,
        shape,
        state,
        slots,
        positions,
        tiles,
        chunk,
        delta=False,
    )
    _walk(x, chunks, None, weights.skip, gated, shape, state, slots, positions, rows, out)


def _walk(
    x: Tensor,
    chunks: ConvolvedChunks,
    prepared: tuple[Tensor, Tensor] | None,
    skip: Tensor | None,
    gated: bool,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    out: Tensor,
) -> None:
    """Walk over the chunks. `prepared`: the results of `prepare_chunks`; None: Mamba2, without a delta rule."""
    _, _, chunk, key_block = chunks.keys.shape
    value_block, num_warps, num_stages = tune_walk(
        len(rows) * shape.num_heads, shape, chunk, x.element_size(), prepared is not None, processors(x)
    )
    blocks = triton.cdiv(shape.value_dim, value_block)
    _walk_kernel[(shape.num_heads * blocks, len(rows))](
        x,
        chunks.keys,
        chunks.values,
        chunks.gates,
        *(prepared or (None, None)),
        skip,
        state,
        out,
        slots,
        positions,
        rows,
        x.stride(0),
        state.stride(0),
        HEADS=shape.num_heads,
        GROUPS=shape.num_groups,
        KEY=shape.key_dim,
        VALUE=shape.value_dim,
        TAPS=shape.conv_len,
        CHUNK=chunk,
        KEY_BLOCK=key_block,
        VALUES=chunks.values.shape[-1],
        VALUE_BLOCK=value_block,
        DELTA=prepared is not None,
        GATED=gated,
        PRECISION=dot_precision(x.dtype),
        **launch_options(x.device, num_warps, num_stages),
    )


def tune_walk(
    num_matrices: int, shape: RecurrentShape, chunk: int, element_size: int, delta: bool, num_processors: int
) -> tuple[int, int, int]:
    """Rows of a matrix per program, warps, and pipeline stages. Mamba2 has one stage where several programs share a
    multiprocessor, which then hide each other's latency."""
    key_block, value_block = block(shape.key_dim), min(block(shape.value_dim), MIN_COLUMNS)
    chunk_bytes = element_size * chunk * ((3 if delta else 2) * key_block + value_block + (chunk if delta else 0))
    if not delta and num_matrices * block(shape.value_dim) // value_block >= 2 * num_processors:
        return value_block, 4, 1
    return value_block, 4, max(1, min(3, (SHARED_MEMORY_BYTES - element_size * value_block * key_block) // chunk_bytes))


def processors(x: Tensor) -> int:
    """Multiprocessors for `tune_walk`; 1 in the interpreter."""
    return 1 if INTERPRETED else num_multiprocessors(x.device.index)


def chunk_tokens(shape: RecurrentShape, dtype: torch.dtype) -> int:
    """Tokens of a chunk. float32, which only tests use, needs twice the shared memory, so its chunks are smaller."""
    narrow = min(block(shape.key_dim), block(shape.value_dim)) < MIN_COLUMNS
    return SMALL_CHUNK if narrow or dtype == torch.float32 else CHUNK


def fits_delta_walk(shape: RecurrentShape, dtype: torch.dtype) -> bool:
    """Whether `hopper.gated_delta` supports the model's delta nets. Each head adds two elements to a row of x. The
    kernels do not support a beta above 1."""
    return _fits_hopper(shape, dtype, (128, 128), 4) and shape.beta_top == 1.0


def fits_channel_walk(shape: RecurrentShape, dtype: torch.dtype) -> bool:
    """Whether `hopper.channel_delta` supports the model's Kimi Delta Attention. Each head adds one element to a row of
    x."""
    return _fits_hopper(shape, dtype, (128, 128), 8) and shape.num_groups == shape.num_heads


def fits_mamba_walk(shape: RecurrentShape, dtype: torch.dtype) -> bool:
    """Whether `hopper.mamba` supports the model's Mamba2 layers. Each head adds one element to a row of x."""
    return _fits_hopper(shape, dtype, (128, 64), 8)


def _fits_hopper(shape: RecurrentShape, dtype: torch.dtype, dims: tuple[int, int], multiple: int) -> bool:
    """Whether Hopper's kernels support the shape. Rows of x must be multiples of 16 bytes: `multiple` is the number of
    heads whose added elements make one; all other columns are multiples anyway. A thread of the convolution holds four
    taps of a channel."""
    return (
        (shape.key_dim, shape.value_dim) == dims
        and shape.num_heads % multiple == 0
        and shape.num_heads % shape.num_groups == 0
        and 2 <= shape.conv_len <= 4
        and dtype in (torch.bfloat16, torch.float16)
        and chunk_tokens(shape, dtype) == CHUNK
    )
