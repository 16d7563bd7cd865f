"""Prefill attention through the page table: rows of several tokens attend to their cached prefix and to new tokens.

A tile is a run of consecutive tokens of one row, with all query heads that share a key-value head, so that each key is
read once for all of them. Tiles are launched heaviest first, so that the last ones to start are short.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention.decode import padded_dim, sink_weight, tanh
from quire.kernels.triton.launch import (
    compute_type,
    dot_precision,
    index_type,
    launch_options,
    let_next_start,
    wait_for_inputs,
)

TILE_FIELDS = 4  # row, first token, tokens, maximum number of keys visible to the last of them


@triton.jit
def _attend_blocks(
    q,
    acc,
    best,
    total,
    query_positions,
    begin,
    end,
    key_len,
    k_ptr,
    v_ptr,
    table_row,
    kv_offset,
    page_stride,
    slot_stride,
    score_scale,
    softcap,
    window,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Update the running softmax with keys begin : end. MASKED: some queries may not see some of these keys."""
    dims = tl.arange(0, D)
    for start in tl.range(begin, end, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        if MASKED:
            valid = keys < key_len
            page = tl.load(table_row + keys // PAGE, mask=valid, other=0).to(INDEX)
        else:
            page = tl.load(table_row + keys // PAGE).to(INDEX)
        place = page * page_stride + (keys % PAGE) * slot_stride + kv_offset
        where = place[:, None] + dims[None, :]
        if MASKED:
            there = valid[:, None]
            if D > DIM:
                there = there & (dims < DIM)[None, :]
        elif D > DIM:
            there = (dims < DIM)[None, :]
        if MASKED or D > DIM:
            k = tl.load(k_ptr + where, mask=there, other=0.0).to(q.dtype)
        else:
            k = tl.load(k_ptr + where).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFTCAP:
            scores = softcap * tanh(scores * score_scale)
        if MASKED or WINDOW:
            visible = keys[None, :] <= query_positions[:, None]
            if WINDOW:
                visible = visible & (keys[None, :] > query_positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        block_best = tl.max(scores, 1)
        if not SOFTCAP:
            block_best = block_best * score_scale
        new_best = tl.maximum(best, block_best)
        if WINDOW:  # a query may see no key of the first blocks
            safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        else:
            safe_best = new_best
        if SOFTCAP:
            weights = tl.exp2(scores - safe_best[:, None])
        else:
            weights = tl.exp2(scores * score_scale - safe_best[:, None])
        fade = tl.exp2(best - safe_best)
        total = total * fade + tl.sum(weights, 1)
        if MASKED or D > DIM:
            v = tl.load(v_ptr + where, mask=there, other=0.0).to(q.dtype)
        else:
            v = tl.load(v_ptr + where).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        best = new_best
    return acc, best, total


@triton.jit
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
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
    GROUP: tl.constexpr,
    GROUP_STORED: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX: tl.constexpr,
    COMPUTE: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one tile for one kv head. A head has DIM elements, padded to D (see `decode.padded_dim`)."""
    let_next_start(PDL)
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    num_kv_heads = tl.num_programs(0)
    row = tl.load(tiles_ptr + tile * TILE_FIELDS).to(tl.int64)
    first_token = tl.load(tiles_ptr + tile * TILE_FIELDS + 1).to(tl.int64)
    num_tokens = tl.load(tiles_ptr + tile * TILE_FIELDS + 2)
    wait_for_inputs(PDL)
    first_position = tl.load(positions_ptr + first_token).to(tl.int32)
    key_len = first_position + num_tokens

    lanes = tl.arange(0, BLOCK_Q)
    offset = lanes // GROUP_STORED
    member = lanes % GROUP_STORED
    dims = tl.arange(0, D)
    live = (offset < num_tokens) & (member < GROUP)
    heads = kv_head * GROUP + member
    real = live[:, None]
    if D > DIM:
        real = real & (dims < DIM)[None, :]
    q = tl.load(
        q_ptr + (first_token + offset)[:, None] * q_stride + heads[:, None] * DIM + dims[None, :], mask=real, other=0.0
    ).to(COMPUTE)
    query_positions = first_position + offset

    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK * BLOCK
    whole = tl.maximum((first_position + 1) // BLOCK * BLOCK, begin)  # all queries of the tile see all keys before it
    if num_tokens == 0:  # a tile that pads the list
        whole = begin
        key_len = begin
    best = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    table_row = table_ptr + row * table_stride
    kv_offset = kv_head * head_stride
    acc, best, total = _attend_blocks(
        q,
        acc,
        best,
        total,
        query_positions,
        begin,
        whole,
        key_len,
        k_ptr,
        v_ptr,
        table_row,
        kv_offset,
        page_stride,
        slot_stride,
        score_scale,
        softcap,
        window,
        DIM,
        D,
        PAGE,
        BLOCK,
        SOFTCAP,
        WINDOW,
        False,
        PRECISION,
        INDEX,
    )
    acc, best, total = _attend_blocks(
        q,
        acc,
        best,
        total,
        query_positions,
        whole,
        key_len,
        key_len,
        k_ptr,
        v_ptr,
        table_row,
        kv_offset,
        page_stride,
        slot_stride,
        score_scale,
        softcap,
        window,
        DIM,
        D,
        PAGE,
        BLOCK,
        SOFTCAP,
        WINDOW,
        True,
        PRECISION,
        INDEX,
    )
    if SINKS:
        total += sink_weight(sinks_ptr, heads, live, best)
    out = acc * (v_scale / total)[:, None]
    target = out_ptr + ((first_token + offset)[:, None] * num_kv_heads * GROUP + heads[:, None]) * DIM + dims[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Tile sizes and launch options of the prefill kernel."""

    block_q: int = 128  # queries per tile: tokens times the heads that share a key-value head
    block: int = 128  # keys per iteration
    num_warps: int = 8
    num_stages: int = 3


def tune(head_dim: int, element_size: int) -> PrefillTuning:
    """Choose by the bytes of a padded head."""
    if padded_dim(head_dim) * element_size <= 256:
        return PrefillTuning()
    return PrefillTuning(block_q=64, block=32, num_warps=4, num_stages=2)


def tile_tokens(tuning: PrefillTuning, num_heads: int, num_kv_heads: int) -> int:
    """Number of tokens of one tile."""
    return max(1, tuning.block_q // triton.next_power_of_2(num_heads // num_kv_heads))


def list_tiles(rows: list[int], counts: list[int], len_bounds: list[int], tokens_per_tile: int) -> list[list[int]]:
    """Fields of every tile of `rows`, heaviest first. `counts` and `len_bounds` cover all rows of the step."""
    firsts = first_tokens(counts)
    tiles = []
    for row in rows:
        count = counts[row]
        before = len_bounds[row] - count
        for start in range(0, count, tokens_per_tile):
            size = min(tokens_per_tile, count - start)
            tiles.append([row, firsts[row] + start, size, before + start + size])
    tiles.sort(key=lambda tile: -tile[3])
    return tiles


def first_tokens(counts: list[int]) -> list[int]:
    """Index of each row's first token in the step."""
    return list(itertools.accumulate(counts, initial=0))[:-1]


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    tiles: Tensor,
    num_tiles: int,
    scale: float,
    tuning: PrefillTuning,
    *,
    softcap: float | None = None,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend the tokens listed in `tiles` (int32, flat, from `list_tiles`). Arguments and result as those of
    `decode_attention`."""
    num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    group = q.shape[1] // num_kv_heads
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1] * head_dim)
    log2e = 1.4426950408889634
    score_scale = scale * k_scale * log2e if softcap is None else scale * k_scale / softcap
    _prefill_kernel[(num_kv_heads, num_tiles)](
        q,
        k_cache,
        v_cache,
        out,
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
        GROUP=group,
        GROUP_STORED=triton.next_power_of_2(group),
        DIM=head_dim,
        D=padded_dim(head_dim),
        PAGE=k_cache.shape[1],
        BLOCK_Q=tuning.block_q,
        BLOCK=tuning.block,
        SOFTCAP=softcap is not None,
        WINDOW=window is not None,
        SINKS=sinks is not None,
        PRECISION=dot_precision(q.dtype),
        INDEX=index_type(k_cache),
        COMPUTE=compute_type(q, k_cache),
        TILE_FIELDS=TILE_FIELDS,
        **launch_options(q.device, tuning.num_warps, tuning.num_stages),
    )
    return out
