"""Decode attention over the paged KV cache (one token per row), split along the row's keys so that few rows fill a GPU.

A program computes one key-value head of one row, with all query heads that share it, over a share of the row's blocks.
The share is computed on the device from the row's true length, and the grid depends on the host's bounds only, so a
captured launch stays valid as rows grow. The program that finishes last for a row merges its shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

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

MAX_SPLITS = 32
MIN_SPAN = 64  # keys below which a row is not split further
WAVES = 8  # programs per multiprocessor that keep memory busy to the end
FEW_SPLITS = 4  # at most so many splits: enough rows to fill the GPU without small shares
# Four stages instead of five leave room for four programs per multiprocessor instead of three: 4.25 against 4.09 TB/s
# at 8 rows of 32,000 tokens in bfloat16, which get this number of splits. Other numbers of splits were not measured.
FOUR_STAGES_SPLITS = 16
MERGE_ELEMENTS = 8192  # partial results held at a time by the merging program


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def unpack_fp8(pairs, ODD: tl.constexpr, FAST: tl.constexpr):
    """The low (or, with ODD, high) FP8 numbers of 16-bit words that hold two each, as float16. FAST: converts two words
    at a time in the register layout of the matrix units; single bytes could only be loaded one by one."""
    if FAST:
        ASM: tl.constexpr = """
            {
            .reg .b32 both;
            .reg .b16 low, high;
            prmt.b32 both, $1, 0, 0x4420;
            mov.b32 {low, high}, both;
            cvt.rn.f16x2.e4m3x2 $0, low;
            }
            """
        ASM_ODD: tl.constexpr = """
            {
            .reg .b32 both;
            .reg .b16 low, high;
            prmt.b32 both, $1, 0, 0x4431;
            mov.b32 {low, high}, both;
            cvt.rn.f16x2.e4m3x2 $0, low;
            }
            """
        return tl.inline_asm_elementwise(
            ASM_ODD if ODD else ASM, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )
    if ODD:
        pairs = pairs >> 8
    return (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def sink_weight(sinks_ptr, heads, mask, best):
    """What each head's sink adds to the sum of weights. `best`: the largest score, in base 2."""
    sinks = tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32)
    return tl.exp2(sinks * 1.4426950408889634 - best)


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    max_ptr,
    sum_ptr,
    counter_ptr,
    table_ptr,
    positions_ptr,
    token_index_ptr,
    row_index_ptr,
    sinks_ptr,
    q_stride,
    table_stride,
    page_stride,
    slot_stride,
    head_stride,
    score_scale,
    softcap,
    v_scale,
    window,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    GROUP_STORED: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MERGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX: tl.constexpr,
    COMPUTE: tl.constexpr,
    EARLY: tl.constexpr,
    PACKED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one share of one row's keys for one kv head. PACKED: the caches are FP8, read as 16-bit words of two
    numbers, and strides count words. A head has DIM elements, padded to D (see `padded_dim`); if both are equal,
    dimensions are not masked."""
    let_next_start(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    index = tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(0)
    if not EARLY:
        wait_for_inputs(PDL)
    token = index
    if HAS_TOKENS:
        token = tl.load(token_index_ptr + index).to(tl.int64)
    row = index
    if HAS_ROWS:
        row = tl.load(row_index_ptr + index).to(tl.int64)
    # A row that pads the step has no token, or position -1 and possibly no row: nothing of it is read.
    is_there = token >= 0
    token = tl.maximum(token, 0)
    length = (tl.load(positions_ptr + token, mask=is_there, other=-1) + 1).to(tl.int32)
    row = tl.maximum(row, 0)

    first_key = 0
    if WINDOW:
        first_key = tl.maximum(length - window, 0)
    first_block = first_key // BLOCK
    num_blocks = tl.cdiv(length, BLOCK) - first_block
    share = tl.maximum(tl.cdiv(num_blocks, NUM_SPLITS), MIN_BLOCKS)
    num_shares = tl.maximum(tl.cdiv(num_blocks, share), 1)
    begin = first_block + split * share
    end = tl.minimum(begin + share, first_block + num_blocks)

    if split < num_shares:
        group = tl.arange(0, GROUP_BLOCK)
        dims = tl.arange(0, D)
        heads = kv_head * GROUP + group
        real = (group < GROUP)[:, None]
        real_words = real
        if D > DIM:
            real = real & (dims < DIM)[None, :]
            real_words = real_words & (tl.arange(0, D // 2) < DIM // 2)[None, :]
        if EARLY:
            wait_for_inputs(PDL)
        q_row = q_ptr + token * q_stride + heads[:, None] * DIM
        if PACKED:
            words = tl.arange(0, D // 2)
            q = tl.load(q_row + 2 * words[None, :], mask=real_words, other=0.0).to(COMPUTE)
            q_odd = tl.load(q_row + 2 * words[None, :] + 1, mask=real_words, other=0.0).to(COMPUTE)
            acc_even = tl.zeros([GROUP_BLOCK, D // 2], tl.float32)
            acc_odd = tl.zeros([GROUP_BLOCK, D // 2], tl.float32)
        else:
            q = tl.load(q_row + dims[None, :], mask=real, other=0.0).to(COMPUTE)
        best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_BLOCK], tl.float32)
        acc = tl.zeros([GROUP_BLOCK, D], tl.float32)
        table_row = table_ptr + row * table_stride
        for block in tl.range(begin, end):
            keys = block * BLOCK + tl.arange(0, BLOCK)
            valid = keys < length
            page = tl.load(table_row + keys // PAGE, mask=valid, other=0).to(INDEX)
            place = page * page_stride + (keys % PAGE) * slot_stride + kv_head * head_stride
            inside = valid[:, None]
            if PACKED:
                if D > DIM:
                    inside = inside & (words < DIM // 2)[None, :]
                where = place[:, None] + words[None, :]
                k = tl.load(k_ptr + where, mask=inside, other=0)
                scores = tl.dot(q, tl.trans(unpack_fp8(k, False, FAST)))
                scores = tl.dot(q_odd, tl.trans(unpack_fp8(k, True, FAST)), scores) * score_scale
            else:
                if D > DIM:
                    inside = inside & (dims < DIM)[None, :]
                where = place[:, None] + dims[None, :]
                k = tl.load(k_ptr + where, mask=inside, other=0.0).to(COMPUTE)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
            if SOFTCAP:
                scores = softcap * tanh(scores)
            if WINDOW:
                valid = valid & (keys >= first_key)
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - new_best[:, None])
            fade = tl.exp2(best - new_best)
            total = total * fade + tl.sum(weights, 1)
            if PACKED:
                v = tl.load(v_ptr + where, mask=inside, other=0)
                p = weights.to(COMPUTE)
                acc_even = tl.dot(p, unpack_fp8(v, False, FAST), acc_even * fade[:, None])
                acc_odd = tl.dot(p, unpack_fp8(v, True, FAST), acc_odd * fade[:, None])
            else:
                v = tl.load(v_ptr + where, mask=inside, other=0.0).to(COMPUTE)
                acc = tl.dot(weights.to(COMPUTE), v, acc * fade[:, None], input_precision=PRECISION)
            best = new_best
        if PACKED:
            acc = tl.reshape(tl.join(acc_even, acc_odd), [GROUP_BLOCK, D])

        out_base = out_ptr + token * num_kv_heads * GROUP * DIM
        if num_shares == 1:
            if SINKS:
                total += sink_weight(sinks_ptr, heads, group < GROUP, best)
            out = acc * (v_scale / tl.maximum(total, 1e-30))[:, None]
            tl.store(
                out_base + heads[:, None] * DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=real & is_there
            )
        elif NUM_SPLITS > 1:
            # Partial results of (row, kv head): [NUM_SPLITS, GROUP_STORED, DIM], and their maxima and sums.
            cell = (index * num_kv_heads + kv_head) * NUM_SPLITS
            stored = group < GROUP_STORED
            mine = (cell + split) * GROUP_STORED + group
            kept = stored[:, None]
            if D > DIM:
                kept = kept & (dims < DIM)[None, :]
            tl.store(partial_ptr + mine[:, None] * DIM + dims[None, :], acc, mask=kept)
            tl.store(max_ptr + mine, best, mask=stored)
            tl.store(sum_ptr + mine, total, mask=stored)
            tl.debug_barrier()  # all stores of this program precede its arrival
            arrived = tl.atomic_add(counter_ptr + index * num_kv_heads + kv_head, 1, sem="acq_rel")
            if arrived == num_shares - 1:
                tl.store(counter_ptr + index * num_kv_heads + kv_head, 0)  # ready for the next layer
                small = tl.arange(0, GROUP_STORED)
                top = tl.full([GROUP_STORED], float("-inf"), tl.float32)
                mass = tl.zeros([GROUP_STORED], tl.float32)
                merged = tl.zeros([GROUP_STORED, D], tl.float32)
                for start in range(0, num_shares, MERGE):
                    shares = start + tl.arange(0, MERGE)
                    there = (shares < num_shares)[:, None] & (small < GROUP_STORED)[None, :]
                    cells = (cell + shares)[:, None] * GROUP_STORED + small[None, :]
                    parts_best = tl.load(max_ptr + cells, mask=there, other=float("-inf"), cache_modifier=".cg")
                    parts_sum = tl.load(sum_ptr + cells, mask=there, other=0.0, cache_modifier=".cg")
                    whole = there[:, :, None]
                    if D > DIM:
                        whole = whole & (dims < DIM)[None, None, :]
                    parts = tl.load(
                        partial_ptr + cells[:, :, None] * DIM + dims[None, None, :],
                        mask=whole,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_top = tl.maximum(top, tl.max(parts_best, 0))
                    factor = tl.exp2(parts_best - new_top[None, :])
                    fade = tl.exp2(top - new_top)
                    mass = mass * fade + tl.sum(parts_sum * factor, 0)
                    merged = merged * fade[:, None] + tl.sum(parts * factor[:, :, None], 0)
                    top = new_top
                small_heads = kv_head * GROUP + small
                if SINKS:
                    mass += sink_weight(sinks_ptr, small_heads, small < GROUP, top)
                merged = merged * (v_scale / mass)[:, None]
                real_small = (small < GROUP)[:, None]
                if D > DIM:
                    real_small = real_small & (dims < DIM)[None, :]
                tl.store(
                    out_base + small_heads[:, None] * DIM + dims[None, :],
                    merged.to(out_ptr.dtype.element_ty),
                    mask=real_small,
                )


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Tile sizes, splits and launch options of the decode kernel."""

    block: int  # keys per iteration
    num_splits: int
    min_span: int  # keys below which a row is not split further
    num_warps: int = 2
    num_stages: int = 5  # the first two cover the page lookups


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers for the partial results of split rows; all layers of a step share them."""

    partial: Tensor  # [rows, kv_heads, splits, group, head_dim] float32
    best: Tensor  # [rows, kv_heads, splits, group] float32
    total: Tensor  # like `best`
    counters: Tensor  # [rows * kv_heads] int32, zero between launches

    @classmethod
    def create(
        cls, num_rows: int, num_kv_heads: int, group: int, head_dim: int, num_splits: int, device: torch.device
    ) -> DecodeWorkspace | None:
        """Allocate buffers for so many rows; None if rows are not split."""
        if num_splits == 1:
            return None
        shape = (num_rows, num_kv_heads, num_splits, triton.next_power_of_2(group))
        partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        best, total = torch.empty(2, *shape, dtype=torch.float32, device=device)
        return cls(partial, best, total, torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device=device))


def padded_dim(head_dim: int, packed: bool = False) -> int:
    """Number of elements a head is computed with: a power of two of at least the matrix units' minimum, which is twice
    as large if even and odd elements are separate. Padding costs operations, not bytes."""
    return max(32 if packed else 16, triton.next_power_of_2(head_dim))


def tune(
    num_rows: int, num_kv_heads: int, head_dim: int, len_bound: int, element_size: int, device: torch.device
) -> DecodeTuning:
    """Choose how to split the work; correct for any length. `element_size`: bytes of a cache element. The rest
    follows from the number of splits, a power of two, so that few kernels exist, all compiled ahead of time."""
    block = 64 if padded_dim(head_dim) * element_size <= 256 else 32
    num_warps = 2
    num_programs = num_rows * num_kv_heads
    most = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(len_bound, MIN_SPAN)))
    wanted = max(WAVES * num_multiprocessors(device.index) // num_programs, 1)
    num_splits = min(triton.next_power_of_2(wanted), most)
    if element_size == 1 and num_splits <= FEW_SPLITS:  # equal bytes per iteration, more threads to unpack them
        block, num_warps = 2 * block, 4
    num_stages = 4 if element_size == 2 and num_splits == FOUR_STAGES_SPLITS else 5
    return DecodeTuning(block, num_splits, MIN_SPAN, num_warps, num_stages)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    scale: float,
    tuning: DecodeTuning,
    workspace: DecodeWorkspace | None,
    *,
    softcap: float | None = None,
    window: int | None = None,
    token_index: Tensor | None = None,
    row_index: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    num_rows: int | None = None,
    early: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend q [tokens, heads, head_dim] over the caches. Row r of the work is token `token_index[r]` (r if None; below
    0: nothing is computed) with the pages of `page_table[row_index[r]]` (r if None). A position of -1 marks a padding
    row, which yields zeros. `early`: positions and pages were written before the last kernel that was launched without
    programmatic dependent launch, so they may be read while later kernels still run. `sinks` [heads] as in the
    reference. Returns, or fills, [tokens, heads * head_dim].
    """
    num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    group = q.shape[1] // num_kv_heads
    packed = k_cache.dtype == torch.float8_e4m3fn
    compute = compute_type(q, k_cache)
    if packed:
        k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1] * head_dim)
    rows = q.shape[0] if num_rows is None else num_rows
    padded = padded_dim(head_dim, packed)
    merge = max(1, min(tuning.num_splits, MERGE_ELEMENTS // (triton.next_power_of_2(group) * padded)))
    # The kernel computes exponentials in base 2, so scores are scaled by log2(e); with a softcap, after the tanh.
    log2e = 1.4426950408889634
    score_scale = scale * k_scale * log2e if softcap is None else scale * k_scale / softcap
    space = workspace
    _decode_kernel[(num_kv_heads, tuning.num_splits, rows)](
        q,
        k_cache,
        v_cache,
        out,
        space and space.partial,
        space and space.best,
        space and space.total,
        space and space.counters,
        page_table,
        positions,
        token_index,
        row_index,
        sinks,
        q.stride(0),
        page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        score_scale,
        0.0 if softcap is None else softcap * log2e,
        v_scale,
        window or 0,
        GROUP=group,
        GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
        GROUP_STORED=triton.next_power_of_2(group),
        DIM=head_dim,
        D=padded,
        PAGE=k_cache.shape[1],
        BLOCK=tuning.block,
        NUM_SPLITS=tuning.num_splits,
        MIN_BLOCKS=triton.cdiv(tuning.min_span, tuning.block),
        MERGE=merge,
        SOFTCAP=softcap is not None,
        WINDOW=window is not None,
        SINKS=sinks is not None,
        HAS_TOKENS=token_index is not None,
        HAS_ROWS=row_index is not None,
        PRECISION=dot_precision(q.dtype),
        INDEX=index_type(k_cache),
        COMPUTE=compute,
        EARLY=early,
        PACKED=packed,
        FAST=not INTERPRETED,
        **launch_options(q.device, tuning.num_warps, tuning.num_stages),
    )
    return out
