"""Prefill attention for Hopper in Gluon: the tiles and meaning of `prefill`, for heads of 128 in bfloat16 or float16.

Warp-specialized: one warp copies keys and values page by page with TMA, two groups of four warps compute. Each group
issues the next block's score product asynchronously while it computes the softmax of the current block. The kernel is
persistent: one program per multiprocessor walks over its items (a tile and a key-value head), so that copying continues
across items. Cache entries behind a row's end must be finite, as in the reference.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.triton.attention.prefill_hopper_load import (
    _fetch_queries,
    _load_blocks,
    _my_items,
    _record,
    _span,
)
from quire.kernels.triton.gluon_names import thread_barrier


@gluon.jit
def _softmax_block(
    scores,
    best,
    total,
    positions,
    start,
    first_position,
    score_scale,
    window,
    WINDOW: gl.constexpr,
    BLOCK: gl.constexpr,
    MMA: gl.constexpr,
):
    """Mask where needed. Returns the block's weights, the running maximum and sum, and the factor that rescales
    earlier sums."""
    if WINDOW or start + BLOCK - 1 > first_position:
        keys = start + gl.arange(0, BLOCK, gl.SliceLayout(0, MMA))
        visible = keys[None, :] <= positions[:, None]
        if WINDOW:
            visible = visible & (keys[None, :] > positions[:, None] - window)
        scores = gl.where(visible, scores, float("-inf"))
    new_best = gl.maximum(best, gl.max(scores, 1) * score_scale)
    # A query may see no key of the first blocks of a window or of its share.
    safe_best = gl.where(new_best == float("-inf"), 0.0, new_best)
    weights = gl.exp2(scores * score_scale - safe_best[:, None])
    fade = gl.exp2(best - safe_best)
    return weights, new_best, total * fade + gl.sum(weights, 1), fade


@gluon.jit
def _attend_half(
    q_low,
    q_high,
    k_low,
    k_high,
    v_low,
    v_high,
    k_full,
    k_empty,
    v_full,
    v_empty,
    q_ptr,
    q_stride,
    out_ptr,
    sums_ptr,
    stats_ptr,
    items_ptr,
    positions_ptr,
    num_kv_heads,
    score_scale,
    window,
    HALF_INDEX: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_STORED: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    RECORD: gl.constexpr,
):
    """Attention of 64 of the tile's 128 queries by four warps."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    MMA_OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA_OUT, k_width=2)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    nothing = gl.full([64, BLOCK], 0.0, gl.float32, MMA)
    lanes = HALF_INDEX * 64 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    rows = HALF_INDEX * 64 + gl.arange(0, 64, gl.SliceLayout(1, MMA_OUT))
    columns = gl.arange(0, 64, gl.SliceLayout(0, MMA_OUT))
    records, turns = _my_items(items_ptr, RECORD)
    done = 0
    kv_head, _row, first_token, num_tokens, share, num_shares = _record(records, 0, turns, RECORD)
    first_position = gl.load(positions_ptr + first_token).to(gl.int32)
    _fetch_queries(
        q_low.index(0),
        q_high.index(0),
        q_ptr,
        q_stride,
        kv_head,
        first_token,
        num_tokens,
        HALF_INDEX,
        GROUP,
        GROUP_STORED,
    )
    next_kv_head, _row, next_first_token, next_num_tokens, next_share, next_num_shares = _record(
        records, 1, turns, RECORD
    )
    for turn in range(turns):
        async_copy.wait_group(0)
        fence_async_shared()
        thread_barrier()
        # Prefetch the next item's queries and position, and the record of the item after it.
        if turn + 1 < turns:
            other = (turn + 1) % 2
            _fetch_queries(
                q_low.index(other),
                q_high.index(other),
                q_ptr,
                q_stride,
                next_kv_head,
                next_first_token,
                next_num_tokens,
                HALF_INDEX,
                GROUP,
                GROUP_STORED,
            )
        next_position = gl.load(positions_ptr + next_first_token).to(gl.int32)
        later_kv_head, _row, later_first_token, later_num_tokens, later_share, later_num_shares = _record(
            records, turn + 2, turns, RECORD
        )
        first_block, num_blocks = _span(first_position, num_tokens, share, num_shares, window, WINDOW, BLOCK)
        low = q_low.index(turn % 2)
        high = q_high.index(turn % 2)
        positions = first_position + lanes // GROUP_STORED
        best = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, MMA))
        acc_low = gl.full([64, 64], 0.0, gl.float32, MMA_OUT)
        acc_high = gl.full([64, 64], 0.0, gl.float32, MMA_OUT)

        stage = done % STAGES
        mbarrier.wait(k_full.index(stage), done // STAGES & 1)
        scores = warpgroup_mma(low, k_low.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma(high, k_high.index(stage).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, best, total, fade = _softmax_block(
            scores, best, total, positions, first_block * BLOCK, first_position, score_scale, window, WINDOW, BLOCK, MMA
        )
        p = gl.convert_layout(weights.to(dtype), A)
        for i in range(1, num_blocks):
            at = done + i
            before = at - 1
            mbarrier.wait(k_full.index(at % STAGES), at // STAGES & 1)
            scores = warpgroup_mma(low, k_low.index(at % STAGES).permute((1, 0)), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma(high, k_high.index(at % STAGES).permute((1, 0)), scores, is_async=True)
            mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
            acc_low = warpgroup_mma(p, v_low.index(before % STAGES), acc_low, is_async=True)
            acc_high = warpgroup_mma(p, v_high.index(before % STAGES), acc_high, is_async=True)
            scores = warpgroup_mma_wait(2, deps=[scores])
            mbarrier.arrive(k_empty.index(at % STAGES), count=1)
            weights, best, total, fade = _softmax_block(
                scores,
                best,
                total,
                positions,
                (first_block + i) * BLOCK,
                first_position,
                score_scale,
                window,
                WINDOW,
                BLOCK,
                MMA,
            )
            # This phase has already completed, so the wait returns at once. It keeps the assembler from moving the
            # next wait up across it, before the softmax, where the warps would idle while their own product runs.
            mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
            acc_low, acc_high, p = warpgroup_mma_wait(0, deps=[acc_low, acc_high, p])
            mbarrier.arrive(v_empty.index(before % STAGES), count=1)
            factor = gl.convert_layout(fade, gl.SliceLayout(1, MMA_OUT), assert_trivial=True)
            acc_low = acc_low * factor[:, None]
            acc_high = acc_high * factor[:, None]
            p = gl.convert_layout(weights.to(dtype), A)
        done += num_blocks
        last = done - 1
        mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
        acc_low = warpgroup_mma(p, v_low.index(last % STAGES), acc_low, is_async=True)
        acc_high = warpgroup_mma(p, v_high.index(last % STAGES), acc_high, is_async=True)
        acc_low, acc_high, p = warpgroup_mma_wait(0, deps=[acc_low, acc_high, p])
        mbarrier.arrive(v_empty.index(last % STAGES), count=1)

        if num_shares == 1:
            inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, MMA_OUT), assert_trivial=True)
            offset = rows // GROUP_STORED
            member = rows % GROUP_STORED
            live = (offset < num_tokens) & (member < GROUP)
            target = (first_token + offset).to(gl.int64) * (num_kv_heads * GROUP) + kv_head * GROUP + member
            where = out_ptr + target[:, None] * 128 + columns[None, :]
            gl.store(where, (acc_low * inverse[:, None]).to(dtype), mask=live[:, None])
            gl.store(where + 64, (acc_high * inverse[:, None]).to(dtype), mask=live[:, None])
        else:
            slot = gl.load(records + turn * RECORD + 6)
            unfinished = sums_ptr + (slot * 128 + rows)[:, None] * 128 + columns[None, :]
            gl.store(unfinished, acc_low)
            gl.store(unfinished + 64, acc_high)
            gl.store(stats_ptr + slot * 256 + lanes, best)
            gl.store(stats_ptr + slot * 256 + 128 + lanes, total)
        kv_head, first_token, num_tokens, first_position, share, num_shares = (
            next_kv_head,
            next_first_token,
            next_num_tokens,
            next_position,
            next_share,
            next_num_shares,
        )
        next_kv_head, next_first_token, next_num_tokens, next_share, next_num_shares = (
            later_kv_head,
            later_first_token,
            later_num_tokens,
            later_share,
            later_num_shares,
        )


@gluon.jit
def _prefill_hopper_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    sums_ptr,
    stats_ptr,
    table_ptr,
    positions_ptr,
    items_ptr,
    q_stride,
    table_stride,
    score_scale,
    window,
    num_kv_heads,
    GROUP: gl.constexpr,
    GROUP_STORED: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    RECORD: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program per multiprocessor: allocates shared memory and barriers, and starts the warp groups."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PAGES: gl.constexpr = BLOCK // PAGE
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    k_low = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, 64], SHARED)
    k_high = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, 64], SHARED)
    v_low = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, 64], SHARED)
    v_high = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, 64], SHARED)
    # Double-buffered: the next item's queries arrive while this item's are in use.
    q_low_0 = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    q_high_0 = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    q_low_1 = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    q_high_1 = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_empty.index(s), count=2)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (
                _attend_half,
                (
                    q_low_0,
                    q_high_0,
                    k_low,
                    k_high,
                    v_low,
                    v_high,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    q_ptr,
                    q_stride,
                    out_ptr,
                    sums_ptr,
                    stats_ptr,
                    items_ptr,
                    positions_ptr,
                    num_kv_heads,
                    score_scale,
                    window,
                    0,
                    GROUP,
                    GROUP_STORED,
                    WINDOW,
                    BLOCK,
                    STAGES,
                    RECORD,
                ),
            ),
            (
                _attend_half,
                (
                    q_low_1,
                    q_high_1,
                    k_low,
                    k_high,
                    v_low,
                    v_high,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    q_ptr,
                    q_stride,
                    out_ptr,
                    sums_ptr,
                    stats_ptr,
                    items_ptr,
                    positions_ptr,
                    num_kv_heads,
                    score_scale,
                    window,
                    1,
                    GROUP,
                    GROUP_STORED,
                    WINDOW,
                    BLOCK,
                    STAGES,
                    RECORD,
                ),
            ),
            (
                _load_blocks,
                (
                    k_desc,
                    v_desc,
                    k_low._reinterpret(dtype, [STAGES * PAGES, PAGE, 64], SHARED),
                    k_high._reinterpret(dtype, [STAGES * PAGES, PAGE, 64], SHARED),
                    v_low._reinterpret(dtype, [STAGES * PAGES, PAGE, 64], SHARED),
                    v_high._reinterpret(dtype, [STAGES * PAGES, PAGE, 64], SHARED),
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    table_ptr,
                    table_stride,
                    items_ptr,
                    positions_ptr,
                    num_kv_heads,
                    window,
                    PAGE,
                    WINDOW,
                    BLOCK,
                    STAGES,
                    RECORD,
                ),
            ),
        ],
        [4, 1],
        [240, 40],
    )
