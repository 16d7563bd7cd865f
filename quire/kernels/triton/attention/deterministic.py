"""Deterministic attention on CUDA: a token's arithmetic is the same in a prefill chunk, a mixed step and a decode step.

Keys are processed in blocks, and blocks in spans, that begin at fixed positions of the sequence. Each span has its own
softmax; spans are joined in order. So one program may compute a tile, or several programs its spans: the work list
decides which program computes what, never how. Blocks of which a query sees nothing leave its sums unchanged bit for
bit, so the other queries of its tile do not matter. Multiply-adds are written as `fma`, so that contraction is not left
to the compiler's choice per kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention.decode import padded_dim, sink_weight, tanh
from quire.kernels.triton.launch import (
    INTERPRETED,
    compute_type,
    dot_precision,
    index_type,
    launch_options,
    let_next_start,
    wait_for_inputs,
)

SPAN = 512 if not INTERPRETED else 64  # keys whose softmax is one chain of updates
TILE_FIELDS = 4  # row, first token, tokens, first slot among the partial results (-1: not split)
MERGE_LANES = 8  # queries joined by one program


@triton.jit
def _find_tile(tile_ptr, positions_ptr, window, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The tile's row, first token, number of tokens, first slot, first position, and key range begin : end. It is
    empty for a tile without tokens, which pads the list, and for a row that pads the step (position -1)."""
    row = tl.load(tile_ptr).to(tl.int64)
    first_token = tl.load(tile_ptr + 1).to(tl.int64)
    num_tokens = tl.load(tile_ptr + 2)
    slot = tl.load(tile_ptr + 3)
    first_position = tl.load(positions_ptr + first_token).to(tl.int32)
    end = tl.where(num_tokens == 0, 0, first_position + num_tokens)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK * BLOCK
    return row, first_token, num_tokens, slot, first_position, begin, end


@triton.jit
def _join(best, total, acc, other_best, other_total, other):
    """Join two partial softmaxes, the second behind the first. A part without keys (-inf, 0, 0) changes nothing."""
    top = tl.maximum(best, other_best)
    safe = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(best - safe)
    weight = tl.exp2(other_best - safe)
    total = tl.fma(total, fade, other_total * weight)
    acc = tl.fma(acc, fade[:, None], other * weight[:, None])
    return top, total, acc


@triton.jit
def _store_out(
    out_ptr,
    best,
    total,
    acc,
    sinks_ptr,
    first_token,
    num_tokens,
    lanes,
    kv_head,
    num_kv_heads,
    v_scale,
    GROUP: tl.constexpr,
    GROUP_STORED: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Normalize the sums of a tile's queries, including sinks, and store them."""
    offset = lanes // GROUP_STORED
    member = lanes % GROUP_STORED
    dims = tl.arange(0, D)
    live = (offset < num_tokens) & (member < GROUP)
    heads = kv_head * GROUP + member
    if SINKS:
        total += sink_weight(sinks_ptr, heads, live, best)
    out = acc * (v_scale / tl.maximum(total, 1e-30))[:, None]
    target = out_ptr + ((first_token + offset)[:, None] * num_kv_heads * GROUP + heads[:, None]) * DIM + dims[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dims < DIM)[None, :])


@triton.jit(do_not_specialize=["num_lanes"])  # one kernel for all mixes of prefill and decode rows
def _fixed_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    table_ptr,
    positions_ptr,
    tiles_ptr,
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
    num_lanes,
    GROUP: tl.constexpr,
    GROUP_STORED: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX: tl.constexpr,
    COMPUTE: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: all spans of one tile for one kv head; of a tile with slots, every num_programs(2)-th span, each
    written to its slot. A head has DIM elements, padded to D; a slot has room for `num_lanes` queries."""
    let_next_start(PDL)
    kv_head = tl.program_id(0)
    share = tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    wait_for_inputs(PDL)
    row, first_token, num_tokens, slot, first_position, begin, end = _find_tile(
        tiles_ptr + tl.program_id(1) * TILE_FIELDS, positions_ptr, window, WINDOW, BLOCK
    )
    is_whole = slot < 0
    stride = tl.where(is_whole, 1, tl.num_programs(2))
    first_span = begin // SPAN
    if (share == 0) | ((slot >= 0) & ((first_span + share) * SPAN < end)):
        lanes = tl.arange(0, BLOCK_Q)
        offset = lanes // GROUP_STORED
        member = lanes % GROUP_STORED
        dims = tl.arange(0, D)
        in_head = dims < DIM
        live = (offset < num_tokens) & (member < GROUP)
        heads = kv_head * GROUP + member
        q = tl.load(
            q_ptr + (first_token + offset)[:, None] * q_stride + heads[:, None] * DIM + dims[None, :],
            mask=live[:, None] & in_head[None, :],
            other=0.0,
        ).to(COMPUTE)
        query_positions = first_position + offset
        table_row = table_ptr + row * table_stride
        whole_best = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        whole_total = tl.zeros([BLOCK_Q], tl.float32)
        whole = tl.zeros([BLOCK_Q, D], tl.float32)
        for span in range(first_span + share, tl.cdiv(end, SPAN), stride):
            best = tl.full([BLOCK_Q], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_Q], tl.float32)
            acc = tl.zeros([BLOCK_Q, D], tl.float32)
            for start in tl.range(tl.maximum(span * SPAN, begin), tl.minimum((span + 1) * SPAN, end), BLOCK):
                keys = start + tl.arange(0, BLOCK)
                valid = keys < end
                page = tl.load(table_row + keys // PAGE, mask=valid, other=0).to(INDEX)
                place = page * page_stride + (keys % PAGE) * slot_stride + kv_head * head_stride
                where = place[:, None] + dims[None, :]
                there = valid[:, None]
                if D > DIM:
                    there = there & in_head[None, :]
                k = tl.load(k_ptr + where, mask=there, other=0.0).to(COMPUTE)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                if SOFTCAP:
                    scores = softcap * tanh(scores * score_scale)
                visible = keys[None, :] <= query_positions[:, None]
                if WINDOW:
                    visible = visible & (keys[None, :] > query_positions[:, None] - window)
                scores = tl.where(visible, scores, float("-inf"))
                block_best = tl.max(scores, 1)
                if not SOFTCAP:
                    block_best = block_best * score_scale
                top = tl.maximum(best, block_best)
                safe = tl.where(top == float("-inf"), 0.0, top)
                if SOFTCAP:
                    weights = tl.exp2(scores - safe[:, None])
                else:
                    weights = tl.exp2(tl.fma(scores, score_scale, -safe[:, None]))
                fade = tl.exp2(best - safe)
                total = tl.fma(total, fade, tl.sum(weights, 1))
                v = tl.load(v_ptr + where, mask=there, other=0.0).to(COMPUTE)
                acc = tl.dot(weights.to(COMPUTE), v, acc * fade[:, None], input_precision=PRECISION)
                best = top
            if is_whole:
                whole_best, whole_total, whole = _join(whole_best, whole_total, whole, best, total, acc)
            else:
                cell = ((slot + span - first_span).to(tl.int64) * num_kv_heads + kv_head) * num_lanes
                kept = lanes < num_lanes
                tl.store(stats_ptr + 2 * cell + lanes, best, mask=kept)
                tl.store(stats_ptr + 2 * cell + num_lanes + lanes, total, mask=kept)
                tl.store(sums_ptr + (cell + lanes)[:, None] * D + dims[None, :], acc, mask=kept[:, None])
        if is_whole:
            _store_out(
                out_ptr,
                whole_best,
                whole_total,
                whole,
                sinks_ptr,
                first_token,
                num_tokens,
                lanes,
                kv_head,
                num_kv_heads,
                v_scale,
                GROUP,
                GROUP_STORED,
                DIM,
                D,
                SINKS,
            )


@triton.jit(do_not_specialize=["num_lanes"])
def _join_spans_kernel(
    out_ptr,
    sums_ptr,
    stats_ptr,
    positions_ptr,
    tiles_ptr,
    sinks_ptr,
    v_scale,
    window,
    num_lanes,
    GROUP: tl.constexpr,
    GROUP_STORED: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: ROWS queries of one tile with slots, for one kv head."""
    let_next_start(PDL)
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    wait_for_inputs(PDL)
    _, first_token, num_tokens, slot, _, begin, end = _find_tile(
        tiles_ptr + tl.program_id(1) * TILE_FIELDS, positions_ptr, window, WINDOW, BLOCK
    )
    if slot >= 0:
        lanes = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        dims = tl.arange(0, D)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        first_span = begin // SPAN
        for span in range(first_span, tl.cdiv(end, SPAN)):
            cell = ((slot + span - first_span).to(tl.int64) * num_kv_heads + kv_head) * num_lanes
            other_best = tl.load(stats_ptr + 2 * cell + lanes)
            other_total = tl.load(stats_ptr + 2 * cell + num_lanes + lanes)
            other = tl.load(sums_ptr + (cell + lanes)[:, None] * D + dims[None, :])
            best, total, acc = _join(best, total, acc, other_best, other_total, other)
        _store_out(
            out_ptr,
            best,
            total,
            acc,
            sinks_ptr,
            first_token,
            num_tokens,
            lanes,
            kv_head,
            num_kv_heads,
            v_scale,
            GROUP,
            GROUP_STORED,
            DIM,
            D,
            SINKS,
        )


@dataclass(frozen=True, slots=True)
class DeterministicTuning:
    """Tile sizes; they depend on the model's shape alone."""

    block_q: int  # queries per tile: tokens times the heads that share a key-value head
    block: int  # keys per iteration
    num_warps: int
    num_stages: int


def tune(group: int, head_dim: int, element_size: int) -> DeterministicTuning:
    """Tuning of a shape. `element_size`: bytes of a query's element."""
    block_q = max(64, triton.next_power_of_2(group))
    width = padded_dim(head_dim)
    if element_size == 4:  # no tensor cores; operands are held in registers
        return DeterministicTuning(max(16, triton.next_power_of_2(group)), 32, 4, 2)
    if width <= 128:
        return DeterministicTuning(block_q, 64, 4, 2)
    return DeterministicTuning(block_q, 32 if width > 256 else 64, 8, 2)


@dataclass(frozen=True, slots=True)
class SpanPartials:
    """Partial results of split tiles, by slot, for `_join_spans_kernel`. Without slots the tensors are empty, not
    None, which would select another kernel."""

    lanes: int
    sums: Tensor  # [slots, kv_heads, lanes, padded head_dim] float32: of weighted values
    stats: Tensor  # [slots, kv_heads, 2, lanes] float32: largest score (base 2), sum of weights

    @classmethod
    def create(cls, num_slots: int, num_kv_heads: int, lanes: int, head_dim: int, device: torch.device) -> SpanPartials:
        sums = torch.empty(num_slots, num_kv_heads, lanes, padded_dim(head_dim), dtype=torch.float32, device=device)
        stats = torch.empty(num_slots, num_kv_heads, 2, lanes, dtype=torch.float32, device=device)
        return cls(lanes, sums, stats)


def attend_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    scale: float,
    tuning: DeterministicTuning,
    tiles: Tensor,
    num_tiles: int,
    num_shares: int,
    partials: SpanPartials,
    *,
    out: Tensor,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Attend the tokens listed in `tiles` (int32, flat) into `out` [tokens, heads * head_dim]. `num_shares`: programs
    per tile with slots in `partials`."""
    num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    group = q.shape[1] // num_kv_heads
    log2e = 1.4426950408889634
    score_scale = scale * k_scale * log2e if softcap is None else scale * k_scale / softcap
    shared = {
        "GROUP": group,
        "GROUP_STORED": triton.next_power_of_2(group),
        "DIM": head_dim,
        "D": padded_dim(head_dim),
        "BLOCK": tuning.block,
        "SPAN": SPAN,
        "WINDOW": window is not None,
        "SINKS": sinks is not None,
        "TILE_FIELDS": TILE_FIELDS,
    }
    sums, stats, lanes = partials.sums, partials.stats, partials.lanes
    _fixed_attention_kernel[(num_kv_heads, num_tiles, num_shares)](
        q,
        k_cache,
        v_cache,
        out,
        sums,
        stats,
        page_table,
        positions,
        tiles,
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
        lanes,
        PAGE=k_cache.shape[1],
        BLOCK_Q=tuning.block_q,
        SOFTCAP=softcap is not None,
        PRECISION=dot_precision(q.dtype),
        INDEX=index_type(k_cache),
        COMPUTE=compute_type(q, k_cache),
        **shared,
        **launch_options(q.device, tuning.num_warps, tuning.num_stages),
    )
    if not len(sums):
        return
    rows = min(MERGE_LANES, lanes)
    _join_spans_kernel[(num_kv_heads, num_tiles, lanes // rows)](
        out,
        sums,
        stats,
        positions,
        tiles,
        sinks,
        v_scale,
        window or 0,
        lanes,
        ROWS=rows,
        **shared,
        **launch_options(q.device, num_warps=1),
    )
