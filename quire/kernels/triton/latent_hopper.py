"""The latent attention of `latent` for Hopper where a token has 64 heads or more: same meaning, latents of 512 + 64.

Written in Gluon, because the matrix units are the limit there and Triton leaves them idle. A program has 64 heads of a
token. One warp copies blocks of 64 entries with the copy engine; two groups of four warps take turns at them: a block's
owner works out its scores and weights, and both multiply the weights with the entries' latents, each with one half of
the columns. While one group is at its softmax the other has products under way. What lies in a page behind a row's end
must be finite, as in the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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

RANK = 512
ROPE = 64
HEADS = 64  # of a program
BLOCK = 64  # entries at a time


@gluon.jit
def _find(tile, token_index_ptr, row_index_ptr, tiles_ptr, positions_ptr, split, NUM_SPLITS: gl.constexpr,
          MIN_BLOCKS: gl.constexpr, TILED: gl.constexpr, HAS_TOKENS: gl.constexpr, HAS_ROWS: gl.constexpr,
          TILE_FIELDS: gl.constexpr):  # fmt: skip
    """This program's token and row, how many entries the token sees, and of these the first block, the number of blocks
    (0: nothing to do) and the number of shares."""
    token = tile.to(gl.int64)
    row = token
    if TILED:
        row = gl.load(tiles_ptr + tile * TILE_FIELDS).to(gl.int64)
        token = gl.load(tiles_ptr + tile * TILE_FIELDS + 1).to(gl.int64)
    if HAS_TOKENS:
        token = gl.load(token_index_ptr + tile).to(gl.int64)
    if HAS_ROWS:
        row = gl.load(row_index_ptr + tile).to(gl.int64)
    row = gl.maximum(row, 0)  # a row that only pads the step has position -1: it sees nothing
    length = gl.load(positions_ptr + token).to(gl.int32) + 1
    num_blocks = gl.maximum(gl.cdiv(length, 64), 1)
    share = gl.maximum(gl.cdiv(num_blocks, NUM_SPLITS), MIN_BLOCKS)
    num_shares = gl.cdiv(num_blocks, share)
    first_block = split * share
    return token, row, length, first_block, gl.minimum(share, num_blocks - first_block), num_shares


@gluon.jit
def _copy_half(desc, into, full, slots, column, ROWS: gl.constexpr):
    """256 columns of a block, in tiles of 64 columns of as many rows as a page has together."""
    BOXES: gl.constexpr = 64 // ROWS
    mbarrier.expect(full, 64 * 512)
    for box in gl.static_range(BOXES):
        for chunk in gl.static_range(4):
            tma.async_copy_global_to_shared(desc, [slots[box], column + chunk * 64], full,
                                            into.index(chunk * BOXES + box))  # fmt: skip


@gluon.jit
def _slots(table_row, block, last_page, PAGE: gl.constexpr, ROWS: gl.constexpr):
    """Where the boxes of a block's entries begin."""
    BOXES: gl.constexpr = 64 // ROWS
    slots = ()
    for box in gl.static_range(BOXES):
        entry = block * 64 + box * ROWS
        page = gl.load(table_row + gl.minimum(entry // PAGE, last_page))
        slots = slots + (page * PAGE + entry % PAGE,)
    return slots


@gluon.jit
def _load_blocks(desc, halves, turned, half_full, half_empty, turned_full, turned_empty, table_ptr, table_stride, row,
                 length, first_block, num_blocks, PAGE: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """The copying warp. A block's owner is done with its half first: that one is filled first again."""
    BOXES: gl.constexpr = 64 // ROWS
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    table_row = table_ptr + row * table_stride
    last_page = gl.maximum(length - 1, 0) // PAGE
    for i in range(num_blocks):
        stage = i % 2
        free = (i // 2 & 1) ^ 1
        slots = _slots(table_row, first_block + i, last_page, PAGE, ROWS)
        mbarrier.wait(turned_empty.index(stage), free)
        mbarrier.expect(turned_full.index(stage), 64 * 128)
        pieces = turned.index(stage)._reinterpret(turned.dtype, [BOXES, ROWS, 64], SHARED)
        for box in gl.static_range(BOXES):
            tma.async_copy_global_to_shared(desc, [slots[box], 512], turned_full.index(stage), pieces.index(box))
        for turn in gl.static_range(2):
            half = (stage + turn) % 2
            place = stage * 2 + half
            mbarrier.wait(half_empty.index(place), free)
            pieces = halves.index(place)._reinterpret(halves.dtype, [4 * BOXES, ROWS, 64], SHARED)
            _copy_half(desc, pieces, half_full.index(place), slots, half * 256, ROWS)


@gluon.jit
def _fetch_queries(into, source_ptr, head_stride, first_head, NUM_HEADS: gl.constexpr, WIDTH: gl.constexpr):
    """Begin copying WIDTH elements of each of 64 heads."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads = first_head + gl.arange(0, 64, gl.SliceLayout(1, LOADED))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LOADED))
    source = source_ptr + (heads.to(gl.int64) * head_stride)[:, None] + columns[None, :]
    mask = (heads < NUM_HEADS)[:, None] & (columns < WIDTH)[None, :]
    async_copy.async_copy_global_to_shared(into, source, mask=mask)


@gluon.jit
def _weigh(scores, best, start, length, score_scale, weights_buf, best_buf, fade_buf, full, MMA: gl.constexpr,
           A: gl.constexpr):  # fmt: skip
    """The softmax of an own block, told to the other group as well: its weights as a factor of products, their sum, the
    maximum so far, and what fades all that came before."""
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
def _attend(q_own, q_other, q_turned, halves, turned, weights_buf, best_buf, fade_buf, totals, half_full, half_empty,
            turned_full, turned_empty, q_full, weights_full, totals_full, q_ptr, q_rope_ptr, out_ptr, partial_ptr,
            best_ptr, total_ptr, q_head_stride, out_head_stride, first_head, cell, length, first_block, num_blocks,
            num_shares, score_scale, X: gl.constexpr, NUM_HEADS: gl.constexpr):  # fmt: skip
    """Group X: scores of every other block, and columns X * 256 onward of the result."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    LANE: gl.constexpr = gl.SliceLayout(1, MMA)
    OUT_LANE: gl.constexpr = gl.SliceLayout(1, OUT)
    dtype: gl.constexpr = halves.dtype
    _fetch_queries(q_own, q_ptr + X * 256, q_head_stride, first_head, NUM_HEADS, 256)
    if X == 0:
        _fetch_queries(q_turned, q_rope_ptr, 64, first_head, NUM_HEADS, 64)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(q_full, count=1)
    mbarrier.wait(q_full, 0)

    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    best = gl.full([64], float("-inf"), gl.float32, LANE)
    total = gl.full([64], 0.0, gl.float32, LANE)
    acc = gl.full([64, 256], 0.0, gl.float32, OUT)
    if X == 0:  # the first block has none before it
        mbarrier.wait(turned_full.index(0), 0)
        scores = warpgroup_mma(q_turned, turned.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(half_full.index(0), 0)
        scores = warpgroup_mma(q_own, halves.index(0).permute((1, 0)), scores, is_async=True)
        mbarrier.wait(half_full.index(1), 0)
        scores = warpgroup_mma(q_other, halves.index(1).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(turned_empty.index(0), count=1)
        p, total, best, fade = _weigh(scores, best, first_block * 64, length, score_scale, weights_buf, best_buf,
                                      fade_buf, weights_full.index(0), MMA, A)  # fmt: skip
        acc = warpgroup_mma(p, halves.index(0), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(half_empty.index(0), count=1)

    for turn in range(1 - X, (num_blocks + 1 - X) // 2):
        MINE: gl.constexpr = X
        mbarrier.wait(turned_full.index(MINE), turn & 1)
        scores = warpgroup_mma(q_turned, turned.index(MINE).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(half_full.index(3 * X), turn & 1)
        scores = warpgroup_mma(q_own, halves.index(3 * X).permute((1, 0)), scores, is_async=True)
        # The block before, which is the other group's.
        mbarrier.wait(weights_full.index(1 - X), (turn + X - 1) & 1)
        p = weights_buf.load(A)
        best = best_buf.load(LANE)
        fade = fade_buf.load(LANE)
        total = total * fade
        acc = acc * gl.convert_layout(fade, OUT_LANE, assert_trivial=True)[:, None]
        acc = warpgroup_mma(p, halves.index(2 - X), acc, is_async=True)
        mbarrier.wait(half_full.index(1 + X), turn & 1)
        scores = warpgroup_mma(q_other, halves.index(1 + X).permute((1, 0)), scores, is_async=True)
        acc, p = warpgroup_mma_wait(1, deps=[acc, p])
        mbarrier.arrive(half_empty.index(2 - X), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(turned_empty.index(MINE), count=1)
        p, added, best, fade = _weigh(scores, best, (first_block + 2 * turn + X) * 64, length, score_scale, weights_buf,
                                      best_buf, fade_buf, weights_full.index(X), MMA, A)  # fmt: skip
        total = total * fade + added
        acc = acc * gl.convert_layout(fade, OUT_LANE, assert_trivial=True)[:, None]
        acc = warpgroup_mma(p, halves.index(3 * X), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(half_empty.index(3 * X), count=1)

    if (num_blocks + X) % 2 == 0:  # the last block is the other group's
        mbarrier.wait(weights_full.index(1 - X), ((num_blocks - 1) // 2) & 1)
        p = weights_buf.load(A)
        best = best_buf.load(LANE)
        fade = fade_buf.load(LANE)
        total = total * fade
        acc = acc * gl.convert_layout(fade, OUT_LANE, assert_trivial=True)[:, None]
        acc = warpgroup_mma(p, halves.index(2 - X), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])

    totals.index(X).store(total)
    mbarrier.arrive(totals_full, count=1)
    mbarrier.wait(totals_full, 0)
    total = total + totals.index(1 - X).load(LANE)
    lanes = gl.arange(0, 64, OUT_LANE)
    columns = X * 256 + gl.arange(0, 256, gl.SliceLayout(0, OUT))
    if num_shares == 1:
        inverse = gl.convert_layout(1.0 / gl.maximum(total, 1e-30), OUT_LANE, assert_trivial=True)
        heads = first_head + lanes
        target = out_ptr + (heads.to(gl.int64) * out_head_stride)[:, None] + columns[None, :]
        gl.store(target, (acc * inverse[:, None]).to(dtype), mask=(heads < NUM_HEADS)[:, None])
    else:
        gl.store(partial_ptr + (cell + lanes)[:, None] * 512 + columns[None, :], acc)
        if X == 0:
            places = cell + gl.arange(0, 64, LANE)
            gl.store(best_ptr + places, best)
            gl.store(total_ptr + places, total)


@gluon.jit
def _latent_hopper_kernel(
    q_ptr, q_rope_ptr, desc, out_ptr, partial_ptr, best_ptr, total_ptr, table_ptr, positions_ptr, tiles_ptr,
    token_index_ptr, row_index_ptr, q_stride, q_head_stride, out_stride, out_head_stride, table_stride, score_scale,
    NUM_HEADS: gl.constexpr, PAGE: gl.constexpr, NUM_SPLITS: gl.constexpr, MIN_BLOCKS: gl.constexpr,
    TILED: gl.constexpr, HAS_TOKENS: gl.constexpr, HAS_ROWS: gl.constexpr, TILE_FIELDS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = min(PAGE, 64)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    head_block = gl.program_id(0)
    split = gl.program_id(1)
    tile = gl.program_id(2)
    token, row, length, first_block, num_blocks, num_shares = _find(
        tile, token_index_ptr, row_index_ptr, tiles_ptr, positions_ptr, split, NUM_SPLITS, MIN_BLOCKS, TILED,
        HAS_TOKENS, HAS_ROWS, TILE_FIELDS)  # fmt: skip
    if num_blocks <= 0:
        return
    q_low = gl.allocate_shared_memory(dtype, [64, 256], SHARED)
    q_high = gl.allocate_shared_memory(dtype, [64, 256], SHARED)
    q_turned = gl.allocate_shared_memory(dtype, [64, 64], SHARED)
    halves = gl.allocate_shared_memory(dtype, [4, 64, 256], SHARED)  # of stage 0, then of stage 1
    turned = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    weights_buf = gl.allocate_shared_memory(dtype, [64, 64], SHARED)
    best_buf = gl.allocate_shared_memory(gl.float32, [64], LINE)
    fade_buf = gl.allocate_shared_memory(gl.float32, [64], LINE)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    half_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    half_empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    turned_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turned_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weights_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    totals_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for place in gl.static_range(4):
        mbarrier.init(half_full.index(place), count=1)
        mbarrier.init(half_empty.index(place), count=1)
    for place in gl.static_range(2):
        mbarrier.init(turned_full.index(place), count=1)
        mbarrier.init(turned_empty.index(place), count=1)
        mbarrier.init(weights_full.index(place), count=1)
    mbarrier.init(q_full, count=2)
    mbarrier.init(totals_full, count=2)
    fence_async_shared()
    gl.thread_barrier()
    first_head = head_block * 64
    cell = ((tile.to(gl.int64) * gl.num_programs(0) + head_block) * NUM_SPLITS + split) * 64
    gl.warp_specialize(
        [
            (_attend, (q_low, q_high, q_turned, halves, turned, weights_buf, best_buf, fade_buf, totals, half_full,
                       half_empty, turned_full, turned_empty, q_full, weights_full, totals_full,
                       q_ptr + token * q_stride, q_rope_ptr + token * (NUM_HEADS * 64), out_ptr + token * out_stride,
                       partial_ptr, best_ptr, total_ptr, q_head_stride, out_head_stride, first_head, cell, length,
                       first_block, num_blocks, num_shares, score_scale, 0, NUM_HEADS)),
            (_attend, (q_high, q_low, q_turned, halves, turned, weights_buf, best_buf, fade_buf, totals, half_full,
                       half_empty, turned_full, turned_empty, q_full, weights_full, totals_full,
                       q_ptr + token * q_stride, q_rope_ptr + token * (NUM_HEADS * 64), out_ptr + token * out_stride,
                       partial_ptr, best_ptr, total_ptr, q_head_stride, out_head_stride, first_head, cell, length,
                       first_block, num_blocks, num_shares, score_scale, 1, NUM_HEADS)),
            (_load_blocks, (desc, halves, turned, half_full, half_empty, turned_full, turned_empty, table_ptr,
                            table_stride, row, length, first_block, num_blocks, PAGE, ROWS)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    partial_ptr, best_ptr, total_ptr, out_ptr, positions_ptr, token_index_ptr, out_stride, out_head_stride,
    NUM_HEADS: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, HAS_TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Put the shares of LANES heads of a token together."""
    head_block = tl.program_id(0)
    first_lane = tl.program_id(1) * LANES
    tile = tl.program_id(2).to(tl.int64)
    token = tile
    if HAS_TOKENS:
        token = tl.load(token_index_ptr + tile).to(tl.int64)
    num_blocks = tl.maximum(tl.cdiv(tl.load(positions_ptr + token).to(tl.int32) + 1, 64), 1)
    share = tl.maximum(tl.cdiv(num_blocks, NUM_SPLITS), MIN_BLOCKS)
    num_shares = tl.cdiv(num_blocks, share)
    if num_shares > 1:
        lanes = first_lane + tl.arange(0, LANES)
        columns = tl.arange(0, 512)
        splits = tl.arange(0, NUM_SPLITS)
        cells = ((tile * tl.num_programs(0) + head_block) * NUM_SPLITS + splits)[:, None] * 64 + lanes[None, :]
        there = (splits < num_shares)[:, None]
        best = tl.load(best_ptr + cells, mask=there, other=float("-inf"))
        top = tl.max(best, 0)
        factors = tl.exp2(best - top[None, :])
        total = tl.sum(factors * tl.load(total_ptr + cells, mask=there, other=0.0), 0)
        acc = tl.zeros([LANES, 512], tl.float32)
        for split in range(num_shares):
            cell = ((tile * tl.num_programs(0) + head_block) * NUM_SPLITS + split) * 64 + lanes
            factor = tl.exp2(tl.load(best_ptr + cell) - top)
            acc += factor[:, None] * tl.load(partial_ptr + cell[:, None] * 512 + columns[None, :])
        heads = head_block * 64 + lanes
        target = out_ptr + token * out_stride + heads[:, None].to(tl.int64) * out_head_stride + columns[None, :]
        out = acc / tl.maximum(total, 1e-30)[:, None]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=(heads < NUM_HEADS)[:, None])


def supports(q_latent: Tensor, q_rope: Tensor, cache: Tensor) -> bool:
    """Whether this kernel can do it; `latent` does the rest."""
    page = cache.shape[1]
    return (
        q_latent.dtype == cache.dtype
        and q_latent.dtype in (torch.bfloat16, torch.float16)
        and q_latent.shape[0] >= HEADS
        and q_latent.shape[2] == RANK
        and q_rope.shape[2] == ROPE
        and q_rope.is_contiguous()
        and cache.is_contiguous()
        and page >= 8
        and page & page - 1 == 0
        and cache.numel() // (RANK + ROPE) < 2**31
    )
