"""Work items and copies of the Hopper prefill kernel (`prefill_hopper_kernel`). Written in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


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
