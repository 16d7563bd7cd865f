"""Prepares the chunks of the delta rule's walk for Hopper in one kernel: convolution, norms, gates, T and scores.

Written in Gluon: a program computes a chunk of 64 tokens for the heads (two, or one) that share a key and a query, and
no intermediate goes through global memory. `gated_delta` launches it; the convolution is in `chunk_conv`, T in
`chunk_solve`.

Inputs arrive in parts of 17 kB (a head's values, the key, the query) in three regions of shared memory. Results
overwrite inputs that have been read, so that four programs fit on a multiprocessor. All parts are requested at once,
except that with two heads the query's part is requested when the first head's values have been read:

    region  inputs of (two heads)               (one head)  then holds
    A       the second head's values            values      the key, then scores
    B       the key                             the key     the query, L's diagonal blocks, T: of 16, of 32, whole
    C       the first head's values, the query  the query   -L of each head

One loop runs over the parts, and loops run over the heads, because code that repeats stays in the instruction cache.
Therefore the regions are one allocation indexed at run time, and the compiler synchronizes threads around accesses more
often than needed. `fulls` signal the arrival of each part. Synchronization between threads of a program:
  0. before a part, all threads have read the preceding part's inputs: the query is requested (C) after the first head's
     values are read, the key is written over the last values (A), the query over the key's inputs (B).
  1. before the products, key and query are written, and the query's inputs read: C is free.
  2. before A and B are overwritten, the matrix units have read key and query.
  3. before blocks of 16 are inverted, L's diagonal blocks are written (B); before inverses overwrite them, read.
  4. before the next products and the copies of scores, blocks of 16 (B), L (C) and scores (A) are written.
  5. per head, inside `join_blocks`: blocks of 16 are read, then those of 32 written.
  6. before T is written, blocks of 32 are read; before it is copied, it is written.
Memory that the matrix units or TMA read or overwrite is fenced first, because they access shared memory through the
async proxy.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from quire.kernels.triton.gluon_names import thread_barrier
from quire.kernels.triton.recurrent.hopper.chunk_conv import (
    SHARED,
    UNITS,
    await_part,
    by_age,
    clear_behind,
    convolve,
    fetch,
    load_taps,
    store_normed,
    store_values,
)
from quire.kernels.triton.recurrent.hopper.chunk_solve import MMA, on_diagonal, solve
from quire.kernels.triton.recurrent.hopper.finish import UNTOLD
from quire.kernels.triton.recurrent.hopper.math import exp2, joined

LOG2_E = gl.constexpr(1.4426950408889634)
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # layouts of shared memory without swizzle
PLANE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
BLOCKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _load_gates(
    x_ptr,
    x_stride,
    num_tokens,
    a_log_ptr,
    dt_bias_ptr,
    head,
    COLUMN: gl.constexpr,
    HEADS: gl.constexpr,
    SHARING: gl.constexpr,
):
    """Inputs of the gates, [heads, tokens]. x begins at the chunk's first token."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [SHARING, 4 // SHARING], [1, 0])
    n = gl.arange(0, 64, gl.SliceLayout(0, LANES))
    heads = head + gl.arange(0, SHARING, gl.SliceLayout(1, LANES))
    source = x_ptr + (gl.minimum(n, num_tokens - 1) * x_stride)[None, :] + (COLUMN + heads)[:, None]
    return gl.load(source), gl.load(source + HEADS), gl.load(a_log_ptr + heads), gl.load(dt_bias_ptr + heads)


@gluon.jit
def _make_gates(loaded, num_tokens, gates_ptr, lines, SHARING: gl.constexpr):
    """Compute the gates. The walk gets each token's decay since the chunk began and until it ends, and two lines in
    which its programs exchange sums. `lines` gets the running sums of the log decays in base 2, then beta. Tokens
    behind the row's end neither decay nor write."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [SHARING, 4 // SHARING], [1, 0])
    beta, step, a_log, dt_bias = loaded
    n = gl.arange(0, 64, gl.SliceLayout(0, LANES))
    inside = (n < num_tokens)[None, :]
    step = step.to(gl.float32) + dt_bias.to(gl.float32)[:, None]
    step = gl.where(step > 20.0, step, gl.log(1.0 + gl.exp(gl.minimum(step, 20.0))))
    step = gl.where(inside, -gl.exp(a_log.to(gl.float32))[:, None] * step, 0.0)
    total = gl.associative_scan(step, 1, _add)
    last = gl.sum(gl.where((n == 63)[None, :], total, 0.0), 1)[:, None]
    beta = gl.where(inside, 1.0 / (1.0 + gl.exp(-beta.to(gl.float32))), 0.0)
    target = gates_ptr + gl.arange(0, SHARING, gl.SliceLayout(1, LANES))[:, None] * 256 + n[None, :]
    gl.store(target, gl.exp(total))
    gl.store(target + 64, gl.exp(last - total))
    untold = gl.full([SHARING, 64], UNTOLD, gl.int32, LANES).to(gl.float32, bitcast=True)
    gl.store(target + 128, untold)
    gl.store(target + 192, untold)
    lines.slice(0, SHARING).store(total * LOG2_E)
    lines.slice(SHARING, SHARING).store(beta)


@gluon.jit
def _weigh(alike, asked, lines, scores, lowers, diagonals, SHARING: gl.constexpr):
    """From the products of keys with keys and of queries with keys, [64, 64] each: scores, -L, and the diagonal blocks
    of -L in float32."""
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    rows = gl.arange(0, 64, ROW)[:, None]
    columns = gl.arange(0, 64, COLUMN)[None, :]
    for h in range(SHARING):
        total = lines.index(h)
        beta = -lines.index(SHARING + h).load(ROW)[:, None]
        between = total.load(ROW)[:, None] - total.load(COLUMN)[None, :]
        between = exp2(gl.where(rows >= columns, between, -1e30))
        scores.index(h).store((asked * between).to(scores.dtype))
        lower = alike * (between * beta)  # the diagonal is arbitrary; it is not read
        lowers.index(h).store(lower.to(gl.float16))
        diagonals.index(h).store(on_diagonal(lower).reshape([4, 16, 16]).permute((1, 0, 2)))


@gluon.jit
def _solve(k_tile, q_tile, lowers, diagonals, lines, t_desc, scores_desc, place, SHARING: gl.constexpr):
    """T with its columns times beta, and the scores of each head, from key and query [64, 128] in shared memory, whose
    regions (A and B) they overwrite. See the module's docstring for the barriers."""
    dtype: gl.constexpr = k_tile.dtype
    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    alike = warpgroup_mma(k_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    asked = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    alike, asked = warpgroup_mma_wait(0, deps=[alike, asked])
    thread_barrier()  # 2
    scores = k_tile._reinterpret(dtype, [2, 64, 64], SHARED)
    _weigh(alike, asked, lines, scores, lowers, diagonals, SHARING)
    solve(scores, q_tile, lowers, diagonals, lines, t_desc, scores_desc, place, SHARING, SHARING)


@gluon.jit
def channel_of(part, head, group, GROUPS: gl.constexpr, SHARING: gl.constexpr):
    """First channel of a part: values of the heads, key, query."""
    return gl.where(part < SHARING, 2 * GROUPS + head + part, GROUPS * (SHARING + 1 - part) + group) * 128


@gluon.jit(do_not_specialize=["x_units"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "tiles_ptr"])
def _ready_kernel(
    x_ptr,
    x_desc,
    before_desc,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    keys_ptr,
    values_ptr,
    gates_ptr,
    t_desc,
    scores_desc,
    slots_ptr,
    positions_ptr,
    tiles_ptr,
    x_units,
    slot_stride,
    query_scale,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    SHARING: gl.constexpr,
    TAPS: gl.constexpr,
):
    """One program: SHARING heads of one chunk, their key and query included. A row of x is `x_units` times 8 elements.
    A model needs this compiled once, whatever the step."""
    PARTS: gl.constexpr = SHARING + 2  # values of the heads, key, query
    KEY: gl.constexpr = SHARING
    QUERY: gl.constexpr = SHARING + 1
    CHANNELS: gl.constexpr = (HEADS + 2 * GROUPS) * 128
    dtype: gl.constexpr = values_ptr.dtype.element_ty
    head = gl.program_id(0) * SHARING
    group = head // (HEADS // GROUPS)
    tile = gl.program_id(1)
    row = gl.load(tiles_ptr + 4 * tile)
    first = gl.load(tiles_ptr + 4 * tile + 1).to(gl.int64)
    start = gl.load(tiles_ptr + 4 * tile + 2)
    num_tokens = gl.load(tiles_ptr + 4 * tile + 3) - start  # above 64 if more chunks follow
    slots = gl.allocate_shared_memory(dtype, [3 * UNITS, 8, 64], SHARED)
    fulls = ()
    for _part in gl.static_range(PARTS):
        fulls = joined(fulls, (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),))
    lines = gl.allocate_shared_memory(gl.float32, [2 * SHARING, 64], PLANE)
    for part in gl.static_range(PARTS):
        mbarrier.init(fulls[part], count=1)
    fence_async_shared()
    thread_barrier()
    x_row = first.to(gl.int32) + start
    for part in gl.static_range(3):
        fetch(
            x_desc, before_desc, x_row, channel_of(part, head, group, GROUPS, SHARING), slots, part * UNITS, fulls[part]
        )
    thread_barrier()  # keeps the compiler from delaying some of the copies until the gates are computed
    x_stride = x_units * 8
    loaded = _load_gates(
        x_ptr + (first + start) * x_stride,
        x_stride,
        num_tokens,
        a_log_ptr,
        dt_bias_ptr,
        head,
        CHANNELS + HEADS * 128,
        HEADS,
        SHARING,
    )
    taps = by_age(load_taps(conv_ptr, channel_of(0, head, group, GROUPS, SHARING), TAPS), TAPS)
    ring = (state_ptr + HEADS * 128 * 128, slots_ptr + row, positions_ptr + first, slot_stride)
    place = tile.to(gl.int64) * HEADS + head
    _make_gates(loaded, num_tokens, gates_ptr + place * 256, lines, SHARING)
    values_ptr += place * (64 * 128)
    keys_ptr += (tile.to(gl.int64) * (2 * GROUPS) + group) * (64 * 128)
    mine = (head % (HEADS // GROUPS) == 0).to(gl.int32)  # other heads of the group compute the same key and query
    for part in range(PARTS):  # taps of the next part are prefetched
        channel = channel_of(part, head, group, GROUPS, SHARING)
        taps_ahead = load_taps(conv_ptr, channel_of(gl.minimum(part + 1, QUERY), head, group, GROUPS, SHARING), TAPS)
        thread_barrier()  # 0
        if SHARING == 2 and part == 1:  # four parts for three regions
            fetch(x_desc, before_desc, x_row, group * 128, slots, 0, fulls[QUERY])
        await_part(part, fulls, PARTS)
        slot = part % 3
        if num_tokens < 64:
            clear_behind(slots, slot * UNITS, num_tokens, 64)
        for half in range(2):
            unit = slot * UNITS + 8 * half
            mixed = convolve(slots, unit, taps, (ring, start + 32 * half), channel, CHANNELS, TAPS)
            if part < KEY:
                store_values(mixed, values_ptr + part * (64 * 128), half)
            else:
                offset = gl.where(part == KEY, GROUPS * (64 * 128), 0)
                scale = gl.where(part == KEY, 1.0, query_scale)
                store_normed(mixed, scale, slots, part - 1, keys_ptr + offset, mine, half)
        taps = by_age(taps_ahead, TAPS)
    fence_async_shared()
    thread_barrier()  # 1
    k_tile = slots.index((KEY - 1) * UNITS)._reinterpret(dtype, [64, 128], SHARED)  # A
    q_tile = slots.index(KEY * UNITS)._reinterpret(dtype, [64, 128], SHARED)  # B
    lowers = slots.index(QUERY % 3 * UNITS)._reinterpret(gl.float16, [SHARING, 64, 64], SHARED)  # C
    diagonals = slots.index(KEY * UNITS)._reinterpret(gl.float32, [SHARING, 16, 4, 16], BLOCKS)  # B
    lines = lines._reinterpret(gl.float32, [2 * SHARING, 64], LINE)
    gdc_launch_dependents()  # the walk can start now and waits for this kernel's end; an earlier start was slower
    _solve(k_tile, q_tile, lowers, diagonals, lines, t_desc, scores_desc, place, SHARING)
