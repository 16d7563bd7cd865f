"""Latent attention for Hopper and many heads, with the meaning of `latent`: latents of 512 + 64 in bfloat16 or float16.

Written in Gluon, because the matrix units are the limit and Triton leaves them idle. A program computes 64 heads of a
token, warp-specialized. One warp copies blocks of 64 entries with TMA; two groups of four warps alternate: a block's
owner computes its scores and weights, and both multiply the weights with the entries' latents, each for half of the
columns. While one group computes its softmax, the other has products in flight. Cache entries behind a row's end must
be finite, as in the reference. `validation.latent_trials` decides whether it is used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.gluon_names import thread_barrier


@gluon.jit
def _find(
    tile, tokens_ptr, token_stride, rows_ptr, row_stride, positions_ptr, split, num_splits, MIN_BLOCKS: gl.constexpr
):
    """This program's token and row (a stride of 0: in order), the number of entries the token sees, the program's first
    block and number of blocks (0: nothing to do), and the number of shares."""
    token = tile.to(gl.int64)
    row = token
    if token_stride > 0:
        token = gl.load(tokens_ptr + tile * token_stride).to(gl.int64)
    if row_stride > 0:
        row = gl.load(rows_ptr + tile * row_stride).to(gl.int64)
    row = gl.maximum(row, 0)  # a row that pads the step has position -1: it sees nothing
    length = gl.load(positions_ptr + token).to(gl.int32) + 1
    num_blocks = gl.maximum(gl.cdiv(length, 64), 1)
    share = gl.maximum(gl.cdiv(num_blocks, num_splits), MIN_BLOCKS)
    first_block = split * share
    return token, row, length, first_block, gl.minimum(share, num_blocks - first_block), gl.cdiv(num_blocks, share)


# ---------------------------------------------------------------------------------------------------------------------
# The copying warp


@gluon.jit
def _find_slots(table_row, block, last_page, PAGE: gl.constexpr, ROWS: gl.constexpr):
    """First slots of the boxes of a block of entries; a box holds at most a page."""
    slots = ()
    for box in gl.static_range(64 // ROWS):
        entry = block * 64 + box * ROWS
        page = gl.load(table_row + gl.minimum(entry // PAGE, last_page))
        slots = slots + (page * PAGE + entry % PAGE,)  # type: ignore[assignment]  # noqa: RUF005
    return slots


@gluon.jit
def _load_blocks(
    desc, halves, turned, barriers, table_row, length, first_block, num_blocks, PAGE: gl.constexpr, ROWS: gl.constexpr
):
    """Copy each block as its rotary part and two halves of the latents; first the half that its owner multiplies
    first."""
    BOXES: gl.constexpr = 64 // ROWS
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    half_full, half_empty, turned_full, turned_empty = barriers
    last_page = gl.maximum(length - 1, 0) // PAGE
    for i in range(num_blocks):
        stage = i % 2
        free = (i // 2 & 1) ^ 1
        slots = _find_slots(table_row, first_block + i, last_page, PAGE, ROWS)
        mbarrier.wait(turned_empty.index(stage), free)
        mbarrier.expect(turned_full.index(stage), 64 * 128)
        pieces = turned.index(stage)._reinterpret(turned.dtype, [BOXES, ROWS, 64], SHARED)
        for box in gl.static_range(BOXES):
            tma.async_copy_global_to_shared(desc, [slots[box], 512], turned_full.index(stage), pieces.index(box))
        for turn in gl.static_range(2):
            half = (stage + turn) % 2
            place = stage * 2 + half
            mbarrier.wait(half_empty.index(place), free)
            mbarrier.expect(half_full.index(place), 64 * 512)
            pieces = halves.index(place)._reinterpret(halves.dtype, [4 * BOXES, ROWS, 64], SHARED)
            for box in gl.static_range(BOXES):
                for chunk in gl.static_range(4):  # 64 elements fill the 128 bytes of the swizzle
                    into = pieces.index(chunk * BOXES + box)
                    column = half * 256 + chunk * 64
                    tma.async_copy_global_to_shared(desc, [slots[box], column], half_full.index(place), into)


# ---------------------------------------------------------------------------------------------------------------------
# The two groups


@gluon.jit
def _fetch_queries(into, source_ptr, head_stride, first_head, NUM_HEADS: gl.constexpr, WIDTH: gl.constexpr):
    """Start the asynchronous copy of WIDTH elements of each of 64 heads."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads = first_head + gl.arange(0, 64, gl.SliceLayout(1, LOADED))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LOADED))
    source = source_ptr + (heads.to(gl.int64) * head_stride)[:, None] + columns[None, :]
    mask = (heads < NUM_HEADS)[:, None] & (columns < WIDTH)[None, :]
    async_copy.async_copy_global_to_shared(into, source, mask=mask)


@gluon.jit
def _get_queries(
    q_halves, q_turned, q_full, q_ptr, q_rope_ptr, q_head_stride, first_head, X: gl.constexpr, NUM_HEADS: gl.constexpr
):
    """Copy this group's half of the queries, and wait for the other group's half."""
    _fetch_queries(q_halves.index(X), q_ptr + X * 256, q_head_stride, first_head, NUM_HEADS, 256)
    if X == 0:
        _fetch_queries(q_turned.index(0), q_rope_ptr, 64, first_head, NUM_HEADS, 64)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(q_full, count=1)
    mbarrier.wait(q_full, 0)


@gluon.jit
def _weigh(scores, best, start, length, score_scale, told, full, MMA: gl.constexpr, A: gl.constexpr):
    """Softmax of a block of this group. Returns the weights as a product's operand, their sum, the running maximum, and
    the factor that rescales earlier sums; weights, maximum and factor are also passed to the other group."""
    weights_buf, best_buf, fade_buf = told
    if start + 64 > length:
        keys = start + gl.arange(0, 64, gl.SliceLayout(0, MMA))
        scores = gl.where((keys < length)[None, :], scores, float("-inf"))
    new_best = gl.maximum(best, gl.max(scores, 1) * score_scale)
    safe_best = gl.where(new_best == float("-inf"), 0.0, new_best)
    weights = gl.exp2(scores * score_scale - safe_best[:, None])
    fade = gl.exp2(best - safe_best)
    rounded = weights.to(weights_buf.dtype)
    weights_buf.store(rounded)
    best_buf.store(new_best)
    fade_buf.store(fade)
    mbarrier.arrive(full, count=1)
    return gl.convert_layout(rounded, A), gl.sum(weights, 1), new_best, fade


@gluon.jit
def _hear(acc, total, told, A: gl.constexpr, LANE: gl.constexpr, OUT_LANE: gl.constexpr):
    """Receive the other group's weights and maximum for its block, and rescale the sums of this group."""
    weights_buf, best_buf, fade_buf = told
    p = weights_buf.load(A)
    best = best_buf.load(LANE)
    fade = fade_buf.load(LANE)
    return p, best, total * fade, acc * gl.convert_layout(fade, OUT_LANE, assert_trivial=True)[:, None]


@gluon.jit
def _leave(
    acc,
    best,
    total,
    targets,
    out_head_stride,
    first_head,
    cell,
    num_shares,
    X: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    LANE: gl.constexpr,
    OUT: gl.constexpr,
):
    """Store the result of a row that is not split, or this share's partial result."""
    out_ptr, partial_ptr, best_ptr, total_ptr = targets
    OUT_LANE: gl.constexpr = gl.SliceLayout(1, OUT)
    lanes = gl.arange(0, 64, OUT_LANE)
    heads = first_head + lanes
    columns = X * 256 + gl.arange(0, 256, gl.SliceLayout(0, OUT))
    if num_shares == 1:
        inverse = gl.convert_layout(1.0 / gl.maximum(total, 1e-30), OUT_LANE, assert_trivial=True)
        target = out_ptr + (heads.to(gl.int64) * out_head_stride)[:, None] + columns[None, :]
        gl.store(target, (acc * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=(heads < NUM_HEADS)[:, None])
    else:
        part = partial_ptr + (cell + lanes)[:, None] * 512 + columns[None, :]
        gl.store(part, acc, mask=(heads < NUM_HEADS)[:, None])
        if X == 0:
            places = cell + gl.arange(0, 64, LANE)
            gl.store(best_ptr + places, best)
            gl.store(total_ptr + places, total)


@gluon.jit
def _attend(
    queries,
    halves,
    turned,
    told,
    totals,
    barriers,
    meetings,
    sources,
    targets,
    q_head_stride,
    out_head_stride,
    first_head,
    cell,
    length,
    first_block,
    num_blocks,
    num_shares,
    score_scale,
    X: gl.constexpr,
    NUM_HEADS: gl.constexpr,
):
    """Group X: scores of every other block, and columns X * 256 onward of the result.

    Of the four halves in the two stages, 3 X is the group's own block in its own columns, 1 + X its own block in the
    other columns (for the scores only), and 2 - X the other group's block in its own columns."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    LANE: gl.constexpr = gl.SliceLayout(1, MMA)
    OUT_LANE: gl.constexpr = gl.SliceLayout(1, OUT)
    dtype: gl.constexpr = halves.dtype
    q_halves, q_turned = queries
    weights_buf, best_buf, fade_buf = told
    half_full, half_empty, turned_full, turned_empty = barriers
    q_full, weights_full, totals_full = meetings
    _get_queries(q_halves, q_turned, q_full, sources[0], sources[1], q_head_stride, first_head, X, NUM_HEADS)

    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    total = gl.full([64], 0.0, gl.float32, LANE)
    # The sums begin as a product with zeros. The assembler does not recognize plain zeros as accumulators of the matrix
    # units and would insert waits of its own between the loop's products (warning C7517).
    p = gl.full([64, 64], 0.0, dtype, A)
    acc = gl.full([64, 256], 0.0, gl.float32, OUT)
    acc = warpgroup_mma(p, q_halves.index(0), acc, use_acc=False, is_async=True)
    if X == 0:  # a virtual block before the first, with weights of zero
        weights_buf.store(gl.full([64, 64], 0.0, dtype, MMA))
        best_buf.store(gl.full([64], float("-inf"), gl.float32, LANE))
        fade_buf.store(gl.full([64], 1.0, gl.float32, LANE))
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])

    # Buffer indices include a zero that is known only at run time and changes every turn: with constant indices, all
    # addresses are computed before the loop, and there are no registers left to hold them (224 bytes are spilled).
    zero = gl.minimum(length, 0)
    moved = zero
    for turn in range((num_blocks + 1 - X) // 2):
        mbarrier.wait(turned_full.index(X), turn & 1)
        scores = warpgroup_mma(
            q_turned.index(0), turned.index(X + moved).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        mbarrier.wait(half_full.index(3 * X), turn & 1)
        scores = warpgroup_mma(
            q_halves.index(X + moved), halves.index(3 * X + moved).permute((1, 0)), scores, is_async=True
        )
        # The preceding block, which belongs to the other group, is processed between the parts of this group's scores.
        mbarrier.wait(weights_full.index(1 - X), (turn + X - 1) & 1)
        before = 2 - X
        if X == 0:
            before = gl.where(turn == 0, 0, 2)  # values with zero weights must be finite
        p, best, total, acc = _hear(acc, total, told, A, LANE, OUT_LANE)
        acc = warpgroup_mma(p, halves.index(before), acc, is_async=True)
        mbarrier.wait(half_full.index(1 + X), turn & 1)
        scores = warpgroup_mma(
            q_halves.index(1 - X + moved), halves.index(1 + X + moved).permute((1, 0)), scores, is_async=True
        )
        acc, p = warpgroup_mma_wait(1, deps=[acc, p])
        mbarrier.arrive(half_empty.index(2 - X), count=1, pred=turn + X > 0)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(turned_empty.index(X), count=1)
        mine, added, best, fade = _weigh(
            scores, best, (first_block + 2 * turn + X) * 64, length, score_scale, told, weights_full.index(X), MMA, A
        )
        total = total * fade + added
        acc = acc * gl.convert_layout(fade, OUT_LANE, assert_trivial=True)[:, None]
        acc = warpgroup_mma(mine, halves.index(3 * X), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, mine])
        mbarrier.arrive(half_empty.index(3 * X), count=1)
        moved += zero

    best = best_buf.load(LANE)
    if (num_blocks + X) % 2 == 0:  # the last block belongs to the other group
        mbarrier.wait(weights_full.index(1 - X), ((num_blocks - 1) // 2) & 1)
        p, best, total, acc = _hear(acc, total, told, A, LANE, OUT_LANE)
        acc = warpgroup_mma(p, halves.index(2 - X), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])

    totals.index(X).store(total)
    mbarrier.arrive(totals_full, count=1)
    mbarrier.wait(totals_full, 0)
    total = total + totals.index(1 - X).load(LANE)
    _leave(acc, best, total, targets, out_head_stride, first_head, cell, num_shares, X, NUM_HEADS, LANE, OUT)


# ---------------------------------------------------------------------------------------------------------------------
# The program


@gluon.jit
def _make_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(NUM):
        mbarrier.init(barriers.index(place), count=COUNT)
    return barriers


@gluon.jit(
    do_not_specialize=["token_stride", "row_stride", "table_stride"],
    do_not_specialize_on_alignment=["tokens_ptr", "rows_ptr", "table_ptr", "positions_ptr"],
)
def _latent_hopper_kernel(
    q_ptr,
    q_rope_ptr,
    desc,
    out_ptr,
    partial_ptr,
    best_ptr,
    total_ptr,
    table_ptr,
    positions_ptr,
    tokens_ptr,
    rows_ptr,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    token_stride,
    row_stride,
    score_scale,
    NUM_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    MIN_BLOCKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program: 64 heads of a token over a share of its row. What differs between kinds of steps is read or passed
    at run time, so a model needs this compiled once."""
    gdc_wait()
    gdc_launch_dependents()  # not earlier: the merge kernel reads, before it waits, what was written before this kernel
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    head_block = gl.program_id(0)
    split = gl.program_id(1)
    tile = gl.program_id(2)
    token, row, length, first_block, num_blocks, num_shares = _find(
        tile, tokens_ptr, token_stride, rows_ptr, row_stride, positions_ptr, split, gl.num_programs(1), MIN_BLOCKS
    )
    if num_blocks <= 0:
        return
    q_halves = gl.allocate_shared_memory(dtype, [2, 64, 256], SHARED)
    q_turned = gl.allocate_shared_memory(dtype, [1, 64, 64], SHARED)
    halves = gl.allocate_shared_memory(dtype, [4, 64, 256], SHARED)  # two halves of stage 0, then of stage 1
    turned = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    weights_buf = gl.allocate_shared_memory(dtype, [64, 64], SHARED)
    best_buf = gl.allocate_shared_memory(gl.float32, [64], LINE)
    fade_buf = gl.allocate_shared_memory(gl.float32, [64], LINE)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    barriers = (_make_barriers(4, 1), _make_barriers(4, 1), _make_barriers(2, 1), _make_barriers(2, 1))
    meetings = (_make_barriers(1, 2).index(0), _make_barriers(2, 1), _make_barriers(1, 2).index(0))
    fence_async_shared()
    thread_barrier()
    first_head = head_block * 64
    cell = ((tile.to(gl.int64) * gl.num_programs(0) + head_block) * gl.num_programs(1) + split) * 64
    queries, told = (q_halves, q_turned), (weights_buf, best_buf, fade_buf)
    sources = (q_ptr + token * q_stride, q_rope_ptr + token * (NUM_HEADS * 64))
    targets = (out_ptr + token * out_stride, partial_ptr, best_ptr, total_ptr)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    queries,
                    halves,
                    turned,
                    told,
                    totals,
                    barriers,
                    meetings,
                    sources,
                    targets,
                    q_head_stride,
                    out_head_stride,
                    first_head,
                    cell,
                    length,
                    first_block,
                    num_blocks,
                    num_shares,
                    score_scale,
                    0,
                    NUM_HEADS,
                ),
            ),
            (
                _attend,
                (
                    queries,
                    halves,
                    turned,
                    told,
                    totals,
                    barriers,
                    meetings,
                    sources,
                    targets,
                    q_head_stride,
                    out_head_stride,
                    first_head,
                    cell,
                    length,
                    first_block,
                    num_blocks,
                    num_shares,
                    score_scale,
                    1,
                    NUM_HEADS,
                ),
            ),
            (
                _load_blocks,
                (
                    desc,
                    halves,
                    turned,
                    barriers,
                    table_ptr + row * table_stride,
                    length,
                    first_block,
                    num_blocks,
                    PAGE,
                    min(PAGE, 64),
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )
