"""Prefill attention for Hopper in Gluon: the tiles and meaning of `prefill`, for heads of 128 in bfloat16 or float16.

Warp-specialized: one warp copies keys and values page by page with TMA, two groups of four warps compute. Each group
issues the next block's score product asynchronously while it computes the softmax of the current block. The kernel is
persistent: one program per multiprocessor walks over its items (a tile and a key-value head), so that copying continues
across items. Cache entries behind a row's end must be finite, as in the reference.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.triton.attention.prefill import PrefillTuning
from quire.kernels.triton.attention.prefill_split import BLOCK, LANES, RECORD, SharePartials
from quire.kernels.triton.gluon_names import thread_barrier

HALF = 64  # elements per half of a head: 64 fill the 128 bytes of shared memory's swizzle
STAGES = 2
TUNING = PrefillTuning(block_q=LANES, block=BLOCK)


@gluon.jit
def _my_items(items_ptr, RECORD: gl.constexpr):
    """Pointer to this program's first record, and its number of records."""
    program = gl.program_id(0)
    begin = gl.load(items_ptr + program)
    return items_ptr + gl.num_programs(0) + 1 + begin * RECORD, gl.load(items_ptr + program + 1) - begin


@gluon.jit
def _record(records, turn, turns, RECORD: gl.constexpr):
    """kv head, row, first token, tokens, share and number of shares of item `turn`, or of the last item if `turn` is
    past the end. A program without items reads the record behind its empty list and does nothing with it."""
    record = records + gl.maximum(gl.minimum(turn, turns - 1), 0) * RECORD
    return (
        gl.load(record),
        gl.load(record + 1),
        gl.load(record + 2),
        gl.load(record + 3),
        gl.load(record + 4),
        gl.load(record + 5),
    )


@gluon.jit
def _span(first_position, num_tokens, share, num_shares, window, WINDOW: gl.constexpr, BLOCK: gl.constexpr):
    """First key block of this share of the tile's visible keys, and its number of blocks, which is at least one because
    tiles are cut by their exact length."""
    first_block = 0
    if WINDOW:
        first_block = gl.maximum(first_position - window + 1, 0) // BLOCK
    total = gl.cdiv(first_position + num_tokens, BLOCK) - first_block
    begin = total * share // num_shares
    return first_block + begin, total * (share + 1) // num_shares - begin


@gluon.jit
def _load_blocks(
    k_desc,
    v_desc,
    k_low,
    k_high,
    v_low,
    v_high,
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
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    RECORD: gl.constexpr,
):
    """The copying warp: loads key and value blocks alternately, each in two halves, across item boundaries."""
    PAGES: gl.constexpr = BLOCK // PAGE
    done = 0
    records, turns = _my_items(items_ptr, RECORD)
    kv_head, row, first_token, num_tokens, share, num_shares = _record(records, 0, turns, RECORD)
    first_position = gl.load(positions_ptr + first_token).to(gl.int32)
    for turn in range(turns):
        # The next item's record is loaded early, so that its latency is hidden behind this item's copies.
        next_kv_head, next_row, next_first_token, next_num_tokens, next_share, next_num_shares = _record(
            records, turn + 1, turns, RECORD
        )
        first_block, num_blocks = _span(first_position, num_tokens, share, num_shares, window, WINDOW, BLOCK)
        table_row = table_ptr + row.to(gl.int64) * table_stride
        last_page = (first_position + num_tokens - 1) // PAGE
        column = kv_head * 128
        for i in range(num_blocks):
            stage = (done + i) % STAGES
            free = ((done + i) // STAGES & 1) ^ 1
            first_page = (first_block + i) * PAGES
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), BLOCK * 256)
            for p in gl.static_range(PAGES):
                slot = gl.load(table_row + gl.minimum(first_page + p, last_page)) * PAGE
                into = stage * PAGES + p
                tma.async_copy_global_to_shared(k_desc, [slot, column], k_full.index(stage), k_low.index(into))
                tma.async_copy_global_to_shared(k_desc, [slot, column + 64], k_full.index(stage), k_high.index(into))
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), BLOCK * 256)
            for p in gl.static_range(PAGES):
                slot = gl.load(table_row + gl.minimum(first_page + p, last_page)) * PAGE
                into = stage * PAGES + p
                tma.async_copy_global_to_shared(v_desc, [slot, column], v_full.index(stage), v_low.index(into))
                tma.async_copy_global_to_shared(v_desc, [slot, column + 64], v_full.index(stage), v_high.index(into))
        done += num_blocks
        kv_head, row, num_tokens, share, num_shares = (
            next_kv_head,
            next_row,
            next_num_tokens,
            next_share,
            next_num_shares,
        )
        first_position = gl.load(positions_ptr + next_first_token).to(gl.int32)


@gluon.jit
def _fetch_queries(
    q_low,
    q_high,
    q_ptr,
    q_stride,
    kv_head,
    first_token,
    num_tokens,
    HALF_INDEX: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_STORED: gl.constexpr,
):
    """Start the asynchronous copy of an item's 64 queries of this half."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lanes = HALF_INDEX * 64 + gl.arange(0, 64, gl.SliceLayout(1, LOADED))
    columns = gl.arange(0, 64, gl.SliceLayout(0, LOADED))
    offset = lanes // GROUP_STORED
    member = lanes % GROUP_STORED
    live = (offset < num_tokens) & (member < GROUP)
    start = (first_token + offset).to(gl.int64) * q_stride + (kv_head * GROUP + member) * 128
    source = q_ptr + start[:, None] + columns[None, :]
    mask = live[:, None] & (columns < 64)[None, :]
    async_copy.async_copy_global_to_shared(q_low, source, mask=mask)
    async_copy.async_copy_global_to_shared(q_high, source + 64, mask=mask)
    async_copy.commit_group()


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


def supports(q: Tensor, k_cache: Tensor, plain: bool) -> bool:
    """Whether this kernel supports the shapes (`plain`: no softcap, no sinks); else use `prefill.prefill_attention`."""
    return (
        q.dtype == k_cache.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] == 128
        and k_cache.shape[1] in (8, 16, 32, 64, 128)
        and k_cache.is_contiguous()
        and plain
        and k_cache.numel() // 128 < 2**31
    )


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    items: Tensor,
    programs: int,
    scale: float,
    *,
    partials: SharePartials | None = None,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend as `prefill.prefill_attention`. `items` (int32): tiles of `TUNING` distributed over `programs` by
    `prefill_split`. Results of cut tiles are left in `partials`, for `prefill_split.merge_shares`."""
    num_pages, page, num_kv_heads, head_dim = k_cache.shape
    group = q.shape[1] // num_kv_heads
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1] * head_dim)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape, strides = [num_pages * page, num_kv_heads * head_dim], [num_kv_heads * head_dim, 1]
    k_desc = TensorDescriptor(k_cache, shape, strides, [page, HALF], layout)
    v_desc = TensorDescriptor(v_cache, shape, strides, [page, HALF], layout)
    _prefill_hopper_kernel[(programs,)](
        q,
        k_desc,
        v_desc,
        out,
        partials and partials.sums,
        partials and partials.stats,
        page_table,
        positions,
        items,
        q.stride(0),
        page_table.stride(0),
        scale * 1.4426950408889634,
        window or 0,
        num_kv_heads,
        GROUP=group,
        GROUP_STORED=triton.next_power_of_2(group),
        PAGE=page,
        BLOCK=BLOCK,
        STAGES=STAGES,
        WINDOW=window is not None,
        RECORD=RECORD,
        num_warps=4,
    )
    return out
