"""Latent attention (MLA, absorbed) on the device; implements `kernels.reference.latent`.

All heads read the same cache entries, so heads are the rows of the matrix units' operand: a program takes up to 64 rows
(heads of one token, or of several consecutive tokens of a row if there are fewer heads), reads each entry once, and
uses its latent as key and value. Prefill uses the same kernel: with 64 rows its products are full anyway, keys and
values are not materialized, and a chunk of any size over a context of any length needs no workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.angles import Angles
from quire.kernels.triton.attention.paged import TritonPlan
from quire.kernels.triton.attention.prefill import TILE_FIELDS
from quire.kernels.triton.attention.rope_write import cos_sin, store_cache
from quire.kernels.triton.latent.work_list import MAX_LANES, MIN_SPAN, LatentWork, prepare
from quire.kernels.triton.launch import (
    INTERPRETED,
    compute_type,
    dot_precision,
    index_type,
    launch_options,
    let_next_start,
    num_multiprocessors,
    wait_for_inputs,
)

FEW_LANES = 32
MAX_SPLITS = 32


@triton.jit
def _latent_write_kernel(
    q_ptr,
    entry_ptr,
    norm_ptr,
    positions_ptr,
    frequencies_ptr,
    cache_ptr,
    slots_ptr,
    out_ptr,
    q_stride,
    q_head_stride,
    entry_stride,
    page_stride,
    slot_stride,
    eps,
    angle_scale,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last program of a token writes its cache entry; each other one rotates HEADS queries."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    half = tl.arange(0, HALF_BLOCK)
    there = half < HALF
    first = half
    second = half + HALF
    if INTERLEAVED:
        first = 2 * half
        second = 2 * half + 1
    wait_for_inputs(PDL)
    angle = tl.load(positions_ptr + token).to(tl.float32) * tl.load(frequencies_ptr + half, mask=there, other=0.0)
    cos, sin = cos_sin(angle, FAST)
    cos = cos * angle_scale
    sin = sin * angle_scale
    if block == tl.num_programs(1) - 1:
        slot = tl.load(slots_ptr + token)
        written = slot >= 0
        target = cache_ptr + (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride
        columns = tl.arange(0, RANK_BLOCK)
        inside = columns < RANK
        latent = tl.load(entry_ptr + token * entry_stride + columns, mask=inside, other=0.0).to(tl.float32)
        latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        latent = latent * tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        store_cache(target + columns, latent, inside & written, 1.0, FP8)
        key = entry_ptr + token * entry_stride + RANK
        low = tl.load(key + first, mask=there, other=0.0).to(tl.float32)
        high = tl.load(key + second, mask=there, other=0.0).to(tl.float32)
        store_cache(target + RANK + half, low * cos - high * sin, there & written, 1.0, FP8)
        store_cache(target + RANK + HALF + half, high * cos + low * sin, there & written, 1.0, FP8)
    else:
        heads = block * HEADS + tl.arange(0, HEADS)
        mask = (heads < NUM_HEADS)[:, None] & there[None, :]
        source = q_ptr + token * q_stride + heads[:, None] * q_head_stride + HEAD_DIM - 2 * HALF
        left = tl.load(source + first[None, :], mask=mask, other=0.0).to(tl.float32)
        right = tl.load(source + second[None, :], mask=mask, other=0.0).to(tl.float32)
        turned = out_ptr + (token * NUM_HEADS + heads[:, None]) * 2 * HALF + half[None, :]
        dtype = out_ptr.dtype.element_ty
        tl.store(turned, (left * cos[None, :] - right * sin[None, :]).to(dtype), mask=mask)
        tl.store(turned + HALF, (right * cos[None, :] + left * sin[None, :]).to(dtype), mask=mask)


def latent_write(
    q: Tensor,
    entry: Tensor,
    norm_weight: Tensor,
    eps: float,
    angles: Angles,
    cache: Tensor,
    slots: Tensor,
    interleaved: bool,
) -> Tensor:
    """Implements `reference.latent.latent_write`; `angles` must contain positions. Slots below 0 are skipped."""
    num_tokens, num_heads, head_dim = q.shape
    rank = norm_weight.shape[0]
    rope_dim = entry.shape[1] - rank
    out = q.new_empty(num_tokens, num_heads, rope_dim)
    heads = min(16, triton.next_power_of_2(num_heads))
    _latent_write_kernel[(num_tokens, triton.cdiv(num_heads, heads) + 1)](
        q,
        entry,
        norm_weight,
        angles.positions,
        angles.frequencies,
        cache,
        slots,
        out,
        q.stride(0),
        q.stride(1),
        entry.stride(0),
        cache.stride(0),
        cache.stride(1),
        eps,
        angles.scale,
        NUM_HEADS=num_heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        RANK=rank,
        RANK_BLOCK=triton.next_power_of_2(rank),
        HALF=rope_dim // 2,
        HALF_BLOCK=triton.next_power_of_2(rope_dim // 2),
        PAGE=cache.shape[1],
        INTERLEAVED=interleaved,
        FP8=cache.dtype == torch.float8_e4m3fn,
        FAST=not INTERPRETED,
        **launch_options(q.device, num_warps=4),
    )
    return out


@triton.jit
def _latent_kernel(
    q_ptr,
    q_rope_ptr,
    cache_ptr,
    out_ptr,
    partial_ptr,
    max_ptr,
    sum_ptr,
    counter_ptr,
    table_ptr,
    positions_ptr,
    tiles_ptr,
    token_index_ptr,
    row_index_ptr,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    page_stride,
    slot_stride,
    score_scale,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    TILED: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX: tl.constexpr,
    COMPUTE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: HEADS heads of TOKENS tokens over a share of their row's keys. TILED: tokens are listed in `tiles`;
    otherwise a tile is one token, found as in `decode_attention`."""
    let_next_start(PDL)
    head_block = tl.program_id(0)
    split = tl.program_id(1)
    tile = tl.program_id(2).to(tl.int64)
    wait_for_inputs(PDL)
    num_tokens = 1
    token = tile
    row = tile
    if TILED:
        row = tl.load(tiles_ptr + tile * TILE_FIELDS).to(tl.int64)
        token = tl.load(tiles_ptr + tile * TILE_FIELDS + 1).to(tl.int64)
        num_tokens = tl.load(tiles_ptr + tile * TILE_FIELDS + 2)
    if HAS_TOKENS:
        token = tl.load(token_index_ptr + tile).to(tl.int64)
    if HAS_ROWS:
        row = tl.load(row_index_ptr + tile).to(tl.int64)
    row = tl.maximum(row, 0)  # a row that pads the step has position -1: nothing of it is read
    first_position = tl.load(positions_ptr + token).to(tl.int32)
    length = first_position + num_tokens
    num_blocks = tl.cdiv(length, BLOCK)
    share = tl.maximum(tl.cdiv(num_blocks, NUM_SPLITS), MIN_BLOCKS)
    num_shares = tl.maximum(tl.cdiv(num_blocks, share), 1)

    if split < num_shares:
        LANES: tl.constexpr = HEADS * TOKENS
        lanes = tl.arange(0, LANES)
        offset = lanes // HEADS
        heads = head_block * HEADS + lanes % HEADS
        live = (offset < num_tokens) & (heads < NUM_HEADS)
        ranks = tl.arange(0, RANK)
        ropes = tl.arange(0, ROPE_BLOCK)
        tokens = token + offset
        q = tl.load(
            q_ptr + (tokens * q_stride + heads * q_head_stride)[:, None] + ranks[None, :], mask=live[:, None], other=0.0
        ).to(COMPUTE)
        q_rope = tl.load(
            q_rope_ptr + (tokens * NUM_HEADS + heads)[:, None] * ROPE + ropes[None, :],
            mask=live[:, None] & (ropes < ROPE)[None, :],
            other=0.0,
        ).to(COMPUTE)
        query_positions = first_position + offset
        best = tl.full([LANES], float("-inf"), tl.float32)
        total = tl.zeros([LANES], tl.float32)
        acc = tl.zeros([LANES, RANK], tl.float32)
        table_row = table_ptr + row * table_stride
        first_block = split * share
        next_keys = first_block * BLOCK + tl.arange(0, BLOCK)
        next_page = tl.load(table_row + next_keys // PAGE, mask=next_keys < length, other=0)
        for block in tl.range(first_block, tl.minimum(first_block + share, num_blocks), num_stages=STAGES):
            keys = block * BLOCK + tl.arange(0, BLOCK)
            valid = keys < length
            place = next_page.to(INDEX) * page_stride + (keys % PAGE) * slot_stride
            # The page table is read one block ahead, so that an entry's address is known well before its load.
            next_page = tl.load(table_row + (keys + BLOCK) // PAGE, mask=keys + BLOCK < length, other=0)
            latent = tl.load(cache_ptr + place[:, None] + ranks[None, :], mask=valid[:, None], other=0.0).to(COMPUTE)
            turned = tl.load(
                cache_ptr + place[:, None] + RANK + ropes[None, :],
                mask=valid[:, None] & (ropes < ROPE)[None, :],
                other=0.0,
            ).to(COMPUTE)
            scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
            scores = tl.dot(q_rope, tl.trans(turned), scores, input_precision=PRECISION) * score_scale
            # Every token of a tile sees key 0, and a share begins where its first token still sees all keys: a query
            # can see nothing only in its last blocks, after it has seen something.
            scores = tl.where(keys[None, :] <= query_positions[:, None], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
            weights = tl.exp2(scores - safe_best[:, None])
            fade = tl.exp2(best - safe_best)
            total = total * fade + tl.sum(weights, 1)
            acc = tl.dot(weights.to(COMPUTE), latent, acc * fade[:, None], input_precision=PRECISION)
            best = new_best

        target = out_ptr + (tokens * out_stride + heads * out_head_stride)[:, None] + ranks[None, :]
        if num_shares == 1:
            out = acc / tl.maximum(total, 1e-30)[:, None]
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=live[:, None])
        elif NUM_SPLITS > 1:
            group = tile * tl.num_programs(0) + head_block
            cell = (group * NUM_SPLITS + split) * LANES + lanes
            tl.store(partial_ptr + cell[:, None] * RANK + ranks[None, :], acc)
            tl.store(max_ptr + cell, best)
            tl.store(sum_ptr + cell, total)
            tl.debug_barrier()  # all stores of this program precede its arrival
            arrived = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel")
            if arrived == num_shares - 1:
                tl.store(counter_ptr + group, 0)  # ready for the next layer
                best = tl.full([LANES], float("-inf"), tl.float32)
                total = tl.zeros([LANES], tl.float32)
                acc = tl.zeros([LANES, RANK], tl.float32)
                for other in range(num_shares):
                    cell = (group * NUM_SPLITS + other) * LANES + lanes
                    part_best = tl.load(max_ptr + cell, cache_modifier=".cg")
                    part_sum = tl.load(sum_ptr + cell, cache_modifier=".cg")
                    part = tl.load(partial_ptr + cell[:, None] * RANK + ranks[None, :], cache_modifier=".cg")
                    new_best = tl.maximum(best, part_best)
                    safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
                    factor = tl.exp2(part_best - safe_best)
                    fade = tl.exp2(best - safe_best)
                    total = total * fade + part_sum * factor
                    acc = acc * fade[:, None] + part * factor[:, None]
                    best = new_best
                out = acc / tl.maximum(total, 1e-30)[:, None]
                tl.store(target, out.to(out_ptr.dtype.element_ty), mask=live[:, None])


# ---------------------------------------------------------------------------------------------------------------------
# Choosing and launching


@dataclass(frozen=True, slots=True)
class LatentTuning:
    """Block size and launch options of the latent kernel."""

    block: int = 64  # entries per iteration
    num_warps: int = 8
    num_stages: int = 2


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, plan: TritonPlan, scale: float, tuning: LatentTuning | None = None
) -> Tensor:
    """Implements `reference.latent.latent_attention`."""
    num_heads, _, rank = q_latent.shape
    if plan.latent is None:
        num_processors = num_multiprocessors(q_latent.device.index)
        plan.latent = prepare(
            plan,
            num_heads,
            _heads(num_heads),
            rank,
            q_latent.device,
            lambda programs, len_bound: _num_splits(programs, len_bound, num_processors),
        )
    work: LatentWork = plan.latent
    out = torch.empty_like(q_latent)
    if work.num_tiles:
        _launch(q_latent, q_rope, cache, plan, scale, out, tuning, work, tiled=True)
    if work.num_decodes:
        _launch(q_latent, q_rope, cache, plan, scale, out, tuning, work, tiled=False)
    return out


def tune(lanes: int, rank: int, element_size: int) -> LatentTuning:
    """Choose a tuning: blocks of entries in flight and the queries must fit into a multiprocessor's shared memory; with
    few lanes twice, so that one program computes while the other waits for its entries."""
    if rank * element_size > 1024:
        return LatentTuning(block=16)
    return LatentTuning(block=32, num_warps=4, num_stages=3) if lanes <= FEW_LANES else LatentTuning()


def _heads(num_heads: int) -> int:
    """Heads per program."""
    return min(MAX_LANES, max(16, triton.next_power_of_2(num_heads)))


def _num_splits(num_programs: int, len_bound: int, num_processors: int) -> int:
    """Number of splits. Partial results are large, so rows are split only where whole rows leave much of the GPU
    idle."""
    if 4 * num_programs >= 3 * num_processors:
        return 1
    most = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(len_bound, MIN_SPAN)))
    return min(most, triton.next_power_of_2(triton.cdiv(num_processors, num_programs)))


def _launch(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    plan: TritonPlan,
    scale: float,
    out: Tensor,
    tuning: LatentTuning | None,
    work: LatentWork,
    tiled: bool,
) -> None:
    num_heads, _, rank = q_latent.shape
    rope_dim, heads = q_rope.shape[2], _heads(num_heads)
    tuning = tuning or tune(MAX_LANES if tiled else heads, rank, q_latent.element_size())
    splits = 1 if tiled else work.num_splits
    _latent_kernel[(triton.cdiv(num_heads, heads), splits, work.num_tiles if tiled else work.num_decodes)](
        q_latent,
        q_rope,
        cache,
        out,
        work.partial,
        work.best,
        work.total,
        work.counters,
        plan.page_table,
        plan.positions,
        work.tiles,
        work.token_index,
        work.row_index,
        q_latent.stride(1),
        q_latent.stride(0),
        out.stride(1),
        out.stride(0),
        plan.page_table.stride(0),
        cache.stride(0),
        cache.stride(1),
        scale * 1.4426950408889634,
        NUM_HEADS=num_heads,
        HEADS=heads,
        TOKENS=MAX_LANES // heads if tiled else 1,
        RANK=rank,
        ROPE=rope_dim,
        ROPE_BLOCK=max(16, triton.next_power_of_2(rope_dim)),
        PAGE=cache.shape[1],
        BLOCK=tuning.block,
        NUM_SPLITS=splits,
        MIN_BLOCKS=triton.cdiv(MIN_SPAN, tuning.block),
        TILED=tiled,
        HAS_TOKENS=not tiled and work.token_index is not None,
        HAS_ROWS=not tiled and work.row_index is not None,
        TILE_FIELDS=TILE_FIELDS,
        PRECISION=dot_precision(q_latent.dtype),
        INDEX=index_type(cache),
        COMPUTE=compute_type(q_latent, cache),
        STAGES=tuning.num_stages,
        **launch_options(q_latent.device, tuning.num_warps, tuning.num_stages),
    )
