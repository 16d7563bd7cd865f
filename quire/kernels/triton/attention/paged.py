"""Paged attention on Triton for steps that mix decode rows (one token) and prefill rows (several tokens).

Implements the interface of `kernels.reference.attention`: plan once per step, attend in every layer. A decode-only step
needs nothing from the host but its length bounds, so it can be captured; a mixed step uploads one small table without
synchronizing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.attention import decode, prefill, prefill_hopper, prefill_split
from quire.kernels.triton.launch import num_multiprocessors, supports_gluon
from quire.kernels.triton.linear import fp8
from quire.kernels.upload import send

MAX_SCRATCH_TOKENS = 1 << 16  # tokens of an FP8 cache dequantized for one step: 2 x 128 MiB with 8 heads of 128


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors that an FP8 cache's entries are multiplied with."""

    k: float = 1.0
    v: float = 1.0


@dataclass(slots=True)
class _Scratch:
    """Pages of the prefill rows, dequantized to the type of the queries; each layer of a step overwrites them."""

    rows: Tensor  # [pages] int32: row that each page is copied from
    columns: Tensor  # [pages] int32: column of the page in that row's page table
    table: Tensor  # [prefill rows, pages] int32
    k: Tensor  # [pages, page_tokens, kv_heads, head_dim]
    v: Tensor


@dataclass(slots=True)
class AttentionWork:
    """Tunings, work lists and buffers of one step, shared by all layers of a cache group."""

    decode_tuning: decode.DecodeTuning | None = None
    workspace: decode.DecodeWorkspace | None = None
    token_index: Tensor | None = None  # [decode rows] int32; None: all tokens of the step, in order
    row_index: Tensor | None = None  # [decode rows]; None: rows in order
    prefill_tuning: prefill.PrefillTuning | None = None
    tiles: Tensor | None = None  # int32, see `prefill.list_tiles`
    num_tiles: int = 0
    items: Tensor | None = None  # int32, see `prefill_split.distribute_tiles`; None: `prefill` attends
    num_programs: int = 0
    merges: Tensor | None = None  # int32: merges of the items that were cut
    num_merges: int = 0
    partials: prefill_split.SharePartials | None = None
    scratch: _Scratch | None = None


@dataclass(slots=True)
class TritonPlan:
    """A step's rows for attention, and the work that its first layer prepares."""

    page_table: Tensor  # [rows, max_pages] int32
    positions: Tensor  # [tokens] int64
    counts: list[int]
    len_bounds: list[int]
    page_tokens: int
    window: int | None
    row_index: Tensor | None  # [rows]: index of each row of the step in `page_table`; None: in order
    early: bool = False  # see `decode_attention`
    hopper: bool = True  # whether `prefill_hopper` may be used where device and shape allow it
    work: Any = None  # the `CapturedWork` of a captured step
    prepared: Any = (
        None  # what the attention implementation prepares: `AttentionWork`, or `deterministic_tiles.TileWork`
    )
    latent: Any = None  # what `triton.latent` prepares, instead of `prepared`


def plan_attention(
    page_table: Tensor,
    positions: Tensor,
    counts: list[int],
    len_bounds: list[int],
    page_tokens: int,
    window: int | None,
    dtype: torch.dtype,
    row_index: Tensor | None = None,
    early: bool = False,
    work: Any = None,
    hopper: bool = True,
) -> TritonPlan:
    """Plan a step's attention, as `reference.attention.plan_attention`. With `row_index` (decode-only steps)
    `page_table` may be the permanent table of all rows; `early` is passed to `decode_attention`. Work is listed when
    the first layer attends, or by the owner of `work`, a `CapturedWork`. `hopper=False` excludes `prefill_hopper`."""
    return TritonPlan(page_table, positions, counts, len_bounds, page_tokens, window, row_index, early, hopper, work)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TritonPlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """Attend as `reference.attention.paged_attention`. `scales`: those of an FP8 cache."""
    if plan.prepared is None:
        plain = softcap is None and sinks is None
        listed = _prepare if plan.work is None else plan.work.prepare
        plan.prepared = listed(plan, q, k_cache, plain)
    work = plan.prepared
    scales = scales or Scales()
    num_tokens, num_heads, head_dim = q.shape
    # A captured step may contain padding tokens that no row attends for; what they write to the cache must be finite.
    out = (q.new_empty if plan.work is None else q.new_zeros)(num_tokens, num_heads * head_dim)
    if work.items is not None:
        pages, keys, values = plan.page_table, k_cache, v_cache
        if (scratch := work.scratch) is not None:
            pages, keys, values = scratch.table, scratch.k, scratch.v
            fp8.dequantize_pages(
                k_cache, v_cache, plan.page_table, scratch.rows, scratch.columns, keys, values, scales.k, scales.v
            )
        prefill_hopper.prefill_attention(
            q,
            keys,
            values,
            pages,
            plan.positions,
            work.items,
            work.num_programs,
            scale,
            partials=work.partials,
            window=plan.window,
            out=out,
        )
        if work.num_merges and work.partials is not None and work.merges is not None:
            num_kv_heads = k_cache.shape[2]
            prefill_split.merge_shares(
                work.partials, work.merges, work.num_merges, num_kv_heads, num_heads // num_kv_heads, out
            )
    elif work.tiles is not None and work.prefill_tuning is not None:
        prefill.prefill_attention(
            q,
            k_cache,
            v_cache,
            plan.page_table,
            plan.positions,
            work.tiles,
            work.num_tiles,
            scale,
            work.prefill_tuning,
            softcap=softcap,
            window=plan.window,
            k_scale=scales.k,
            v_scale=scales.v,
            out=out,
            sinks=sinks,
        )
    if work.decode_tuning is not None:
        decode.decode_attention(
            q,
            k_cache,
            v_cache,
            plan.page_table,
            plan.positions,
            scale,
            work.decode_tuning,
            work.workspace,
            softcap=softcap,
            window=plan.window,
            token_index=work.token_index,
            row_index=work.row_index,
            k_scale=scales.k,
            v_scale=scales.v,
            out=out,
            num_rows=None if work.token_index is None else work.token_index.shape[0],
            early=plan.early,
            sinks=sinks,
        )
    return out


def _prepare(plan: TritonPlan, q: Tensor, k_cache: Tensor, plain: bool) -> AttentionWork:
    """List the work of an eager step. `plain`: neither softcap nor sinks."""
    counts, bounds = plan.counts, plan.len_bounds
    num_heads, num_kv_heads, head_dim = q.shape[1], k_cache.shape[2], k_cache.shape[3]
    work = AttentionWork()
    decodes = [row for row, count in enumerate(counts) if count == 1]
    prefills = [row for row, count in enumerate(counts) if count > 1]
    if decodes:
        # The bound is the table's width, not the rows' lengths: a kernel is compiled per number of splits, which then
        # depends on the number of rows alone.
        len_bound = plan.page_table.shape[1] * plan.page_tokens
        if plan.window is not None:
            len_bound = min(len_bound, plan.window)
        plan_decodes(work, len(decodes), len_bound, q, k_cache)
    if not prefills:
        work.row_index = plan.row_index
        return work
    assert plan.row_index is None, "a permanent page table is for decode-only steps"
    fresh = _scratch_pages(prefills, bounds, q, k_cache)
    like_cache = k_cache if fresh is None else q.new_empty(fresh[-1], *k_cache.shape[1:])
    hopper = plan.hopper and supports_gluon(q.device.index) and prefill_hopper.supports(q, like_cache, plain)
    work.prefill_tuning = prefill_hopper.TUNING if hopper else prefill.tune(head_dim, q.element_size())
    per_tile = prefill.tile_tokens(work.prefill_tuning, num_heads, num_kv_heads)
    tiles = prefill.list_tiles(prefills, counts, bounds, per_tile)
    fields = [field for tile in tiles for field in tile]
    items = merges = np.zeros(0, np.int32)
    owners: list[int] = []
    columns: list[int] = []
    if not hopper:
        fresh = None
    else:
        if fresh is not None:
            place = {row: index for index, row in enumerate(prefills)}
            tiles = [[place[row], *rest] for row, *rest in tiles]
            for row, begin, end in zip(prefills, fresh, fresh[1:], strict=False):
                owners += [row] * (end - begin)
                columns += range(end - begin)
        work.num_programs = num_multiprocessors(q.device.index)
        shares = prefill_split.distribute_tiles(tiles, num_kv_heads, plan.window, work.num_programs)
        spare = np.zeros(prefill_split.RECORD, np.int32)  # a program without items still reads one record
        fields, items, merges = [], np.concatenate((shares.items, spare)), shares.merges
        work.num_merges = len(merges) // prefill_split.MERGE
        work.partials = prefill_split.SharePartials.create(work.num_programs, q.device)
    firsts = prefill.first_tokens(counts)
    parts: list[Sequence[int] | np.ndarray] = [
        fields,
        items,
        [firsts[row] for row in decodes],
        decodes,
        owners,
        columns,
        (fresh or [])[:-1],
        merges,
    ]
    uploaded = upload_ints(parts, q.device)
    work.num_tiles, work.tiles = len(tiles), uploaded[0]
    if hopper:
        work.items, work.merges = uploaded[1], uploaded[7]
        if fresh is not None:
            # A row of the table continues with the next row's pages; keys there are masked. The width is rounded up so
            # that strides repeat and no kernel is compiled for a new one.
            width = -(-max(end - begin for begin, end in itertools.pairwise(fresh)) // 16) * 16
            table = uploaded[6][:, None] + torch.arange(width, dtype=torch.int32, device=q.device)
            work.scratch = _Scratch(uploaded[4], uploaded[5], table, like_cache, torch.empty_like(like_cache))
    if decodes:
        work.token_index, work.row_index = uploaded[2:4]
    return work


def plan_decodes(work: AttentionWork, num_decodes: int, len_bound: int, q: Tensor, k_cache: Tensor) -> None:
    """Choose the tuning and allocate the buffers for a step's decode rows."""
    num_heads, num_kv_heads, head_dim = q.shape[1], k_cache.shape[2], k_cache.shape[3]
    work.decode_tuning = decode.tune(num_decodes, num_kv_heads, head_dim, len_bound, k_cache.element_size(), q.device)
    work.workspace = decode.DecodeWorkspace.create(
        num_decodes, num_kv_heads, num_heads // num_kv_heads, head_dim, work.decode_tuning.num_splits, q.device
    )


def _scratch_pages(prefills: list[int], bounds: list[int], q: Tensor, k_cache: Tensor) -> list[int] | None:
    """First copied page of each prefill row and, last, the number of copied pages. None if the cache is read in place,
    or if copies would exceed MAX_SCRATCH_TOKENS."""
    if k_cache.dtype == q.dtype:
        return None
    page = k_cache.shape[1]
    begins = list(itertools.accumulate((-(-bounds[row] // page) for row in prefills), initial=0))
    return begins if begins[-1] * page <= MAX_SCRATCH_TOKENS else None


def upload_ints(parts: Sequence[Sequence[int] | np.ndarray], device: torch.device) -> list[Tensor]:
    """Upload int32 arrays in one copy, without synchronizing. Each part begins at a multiple of 16 bytes, because
    Triton specializes kernels on pointer alignment."""
    begins = list(itertools.accumulate((-(-len(part) // 4) * 4 for part in parts), initial=0))
    numbers = np.zeros(begins[-1], np.int32)
    for begin, part in zip(begins, parts, strict=False):
        numbers[begin : begin + len(part)] = part
    sent = send(torch.from_numpy(numbers), device)
    return [sent[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=False)]
