"""Paged attention in plain torch over a ragged batch: the CPU path, and the oracle for faster implementations.

`plan_attention` computes once per step what does not depend on the layer (pages and masks); every layer of a cache
group then calls `paged_attention` with that plan. Masked keys get a weight of exactly zero; since 0 * NaN is NaN, this
requires finite values throughout the cache. Caches start as zeros and a forward writes finite values; after a forward
with non-finite output, the pages of its row must be zeroed before another row uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.cache_forms import PackedPlane
from quire.kernels.reference.packed_cache import read_packed, rotate

# Decode rows are batched, padded to the longest. A further batch is opened where it saves this many padded tokens,
# which is about the cost of its extra calls on a CPU.
MIN_SAVED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A batch of decode rows (one token each), attended in one call."""

    token_index: Tensor | None  # [rows] int64: indices into the step's tokens; None: all of them, in order
    num_rows: int
    pages: Tensor  # [rows * pages_per_row] int32
    mask: Tensor  # [rows, 1, 1, key_len]: 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One prefill row (several tokens)."""

    first: int  # index of its first token; the tokens are first : first + count
    count: int
    pages: Tensor  # [pages] int32
    mask: Tensor | None  # [count, key_len]: 0 or -inf; None: causal, and the keys are exactly these tokens


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    num_tokens: int
    decodes: list[DecodeRows] = field(default_factory=list)
    prefills: list[PrefillRow] = field(default_factory=list)


def plan_attention(
    page_table: Tensor,
    positions: Tensor,
    counts: list[int],
    len_bounds: list[int],
    page_tokens: int,
    window: int | None,
    dtype: torch.dtype,
) -> ReferencePlan:
    """Builds the plan that all layers with this page table and window share in one step.

    `page_table` [rows, max_pages] int32, `positions` [tokens] int64; `counts` and `len_bounds` are per row, on the
    host. The bounds may exceed the true lengths: they only size tensors, and `positions` decide which keys are visible.
    """
    mask_dtype = torch.float32 if dtype == torch.uint8 else dtype  # packed caches are read as float32
    planner = _PagePlanner(page_table, positions, page_tokens, window, mask_dtype)
    plan = ReferencePlan(num_tokens=sum(counts))
    firsts, first = [], 0
    for count in counts:
        firsts.append(first)
        first += count
    decode_rows = [row for row, count in enumerate(counts) if count == 1]
    for rows in _split_by_len(decode_rows, len_bounds):
        plan.decodes.append(_plan_decodes(planner, rows, firsts, len_bounds, whole_step=len(rows) == plan.num_tokens))
    for row, count in enumerate(counts):
        if count > 1:
            plan.prefills.append(_plan_prefill(planner, row, firsts[row], count, len_bounds[row]))
    return plan


def paged_attention(
    q: Tensor,
    k_cache: Tensor | PackedPlane,
    v_cache: Tensor | PackedPlane,
    plan: ReferencePlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends each token to its row's cached keys and returns [tokens, heads * value_dim].

    q is [tokens, heads, head_dim]. The caches are [pages, page_tokens, kv_heads, head_dim] and already hold this step's
    entries; values may be shorter than keys. `sinks` [heads] are extra softmax scores per head without a value. Packed
    caches hold rotated keys and values, so queries and outputs are rotated here.
    """
    if isinstance(k_cache, PackedPlane):
        seen = _attend_all(rotate(q), k_cache, v_cache, plan, scale, softcap, sinks)
        return rotate(seen.unflatten(-1, (-1, q.shape[-1]))).flatten(-2)
    return _attend_all(q, k_cache, v_cache, plan, scale, softcap, sinks)


def _attend_all(
    q: Tensor,
    k_cache: Tensor | PackedPlane,
    v_cache: Tensor | PackedPlane,
    plan: ReferencePlan,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    if len(plan.decodes) == 1 and plan.decodes[0].token_index is None:
        return _attend_decodes(q, k_cache, v_cache, plan.decodes[0], scale, softcap, sinks)
    if len(plan.prefills) == 1 and not plan.decodes:
        return _attend_prefill(q, k_cache, v_cache, plan.prefills[0], scale, softcap, sinks)
    out = q.new_empty(plan.num_tokens, q.shape[1] * v_cache.shape[-1])
    for rows in plan.decodes:
        assert rows.token_index is not None
        picked = q.index_select(0, rows.token_index)
        out.index_copy_(0, rows.token_index, _attend_decodes(picked, k_cache, v_cache, rows, scale, softcap, sinks))
    for row in plan.prefills:
        span = slice(row.first, row.first + row.count)
        out[span] = _attend_prefill(q[span], k_cache, v_cache, row, scale, softcap, sinks)
    return out


def gather_rows(cache: Tensor, plan: ReferencePlan) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the visible entries of a cache with one KV head, per batch of the plan, for oracles with attention of
    their own: token indices [rows, queries], entries [rows, keys, head_dim], mask [rows, 1, queries, keys] of 0 or
    -inf."""
    for rows in plan.decodes:
        tokens = torch.arange(rows.num_rows) if rows.token_index is None else rows.token_index
        yield tokens.unsqueeze(1), _gather(cache, rows.pages, rows.num_rows)[:, 0], rows.mask
    for row in plan.prefills:
        entries, mask = _gather(cache, row.pages, 1)[:, 0], row.mask
        if mask is None:
            entries = entries[:, : row.count]
            mask = torch.full((row.count, row.count), -torch.inf, dtype=cache.dtype).triu_(1)
        yield torch.arange(row.first, row.first + row.count).unsqueeze(0), entries, mask[None, None]


# ---------------------------------------------------------------------------------------------------------------------
# Planning


@dataclass(frozen=True, slots=True)
class _PagePlanner:
    """Inputs of one step's planning that are common to all rows."""

    page_table: Tensor
    positions: Tensor
    page_tokens: int
    window: int | None
    dtype: torch.dtype

    def pages_and_keys(
        self, table: Tensor, first_position: Tensor, len_bound: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the pages that the rows of `table` [rows, max_pages] need, and the positions of the keys in them.

        With a window, rows longer than it start at the first page visible from `first_position` [rows, 1].
        """
        num_pages = -(-len_bound // self.page_tokens)
        if self.window is not None:
            num_visible = -(-(self.window + count - 2) // self.page_tokens) + 1
            if num_visible < num_pages:
                first_page = (first_position - (self.window - 1)).clamp_(min=0) // self.page_tokens  # [rows, 1]
                index = first_page + torch.arange(num_visible, device=table.device)
                keys = torch.arange(num_visible * self.page_tokens, device=table.device)
                # No query sees keys beyond the table, so the index may be clamped to any page.
                return table.gather(1, index.clamp_(max=table.shape[1] - 1)), first_page * self.page_tokens + keys
        return table[:, :num_pages], torch.arange(num_pages * self.page_tokens, device=table.device)

    def mask(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Returns 0 where a query may see a key, -inf elsewhere; the arguments broadcast against each other."""
        hidden = key_positions > query_positions
        if self.window is not None:
            hidden |= key_positions <= query_positions - self.window
        return torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _split_by_len(rows: list[int], len_bounds: list[int]) -> list[list[int]]:
    """Batches rows of similar length, so that one long row does not pad all others to its length."""
    if not rows:
        return []
    by_len = sorted(rows, key=lambda row: -len_bounds[row])
    batches = [[by_len[0]]]
    longest = len_bounds[by_len[0]]
    for done, row in enumerate(by_len[1:], start=1):
        if (longest - len_bounds[row]) * (len(by_len) - done) > MIN_SAVED_TOKENS:
            batches.append([])
            longest = len_bounds[row]
        batches[-1].append(row)
    return batches if len(batches) > 1 else [rows]


def _plan_decodes(
    planner: _PagePlanner, rows: list[int], firsts: list[int], len_bounds: list[int], whole_step: bool
) -> DecodeRows:
    table, positions, token_index = planner.page_table, planner.positions, None
    if not whole_step:
        row_index, token_index = torch.tensor([rows, [firsts[row] for row in rows]], device=table.device)
        table, positions = table.index_select(0, row_index), positions.index_select(0, token_index)
    positions = positions.unsqueeze(1)
    len_bound = max(len_bounds[row] for row in rows)
    pages, keys = planner.pages_and_keys(table, positions, len_bound, count=1)
    mask = planner.mask(positions, keys)[:, None, None]
    return DecodeRows(token_index, len(rows), pages.reshape(-1), mask)


def _plan_prefill(planner: _PagePlanner, row: int, first: int, count: int, len_bound: int) -> PrefillRow:
    table = planner.page_table[row : row + 1]
    positions = planner.positions[first : first + count].unsqueeze(1)
    pages, keys = planner.pages_and_keys(table, positions[:1], len_bound, count)
    pages = pages.reshape(-1)
    # A bound equal to the count means that no token precedes these: the row starts at position 0.
    if len_bound == count and (planner.window is None or len_bound <= planner.window):
        return PrefillRow(first, count, pages, mask=None)
    return PrefillRow(first, count, pages, planner.mask(positions, keys))


# ---------------------------------------------------------------------------------------------------------------------
# Attending


def _gather(cache: Tensor | PackedPlane, pages: Tensor, num_rows: int) -> Tensor:
    """Returns the entries of these pages as [rows, kv_heads, key_len, head_dim]."""
    _, _, kv_heads, head_dim = cache.shape
    if isinstance(cache, PackedPlane):
        read = read_packed(cache, cache.entries.index_select(0, pages))
        return read.view(num_rows, -1, kv_heads, head_dim).transpose(1, 2)
    return cache.index_select(0, pages).view(num_rows, -1, kv_heads, head_dim).transpose(1, 2)


def _attend_decodes(
    q: Tensor,
    k_cache: Tensor | PackedPlane,
    v_cache: Tensor | PackedPlane,
    rows: DecodeRows,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    num_rows, kv_heads = rows.num_rows, k_cache.shape[2]
    k = _gather(k_cache, rows.pages, num_rows)
    v = _gather(v_cache, rows.pages, num_rows)
    # Query heads that share a KV head become queries of that head, so that no key is copied per query head.
    grouped = q.reshape(num_rows, kv_heads, -1, q.shape[-1])
    if sinks is not None:
        sinks = sinks.view(kv_heads, -1, 1)
    return _attend(grouped, k, v, rows.mask, scale, softcap, sinks).reshape(num_rows, -1)


def _attend_prefill(
    q: Tensor,
    k_cache: Tensor | PackedPlane,
    v_cache: Tensor | PackedPlane,
    row: PrefillRow,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    count, kv_heads, head_dim = row.count, k_cache.shape[2], q.shape[-1]
    # Query heads that share a KV head become a batch over the same keys (expanded with stride 0, no copy).
    grouped = q.view(count, kv_heads, -1, head_dim).permute(2, 1, 0, 3)  # [group, kv_heads, count, head_dim]
    k = _gather(k_cache, row.pages, 1)
    v = _gather(v_cache, row.pages, 1)
    if row.mask is None:
        k, v = k[:, :, :count], v[:, :, :count]
    k, v = (x.expand(grouped.shape[0], -1, -1, -1) for x in (k, v))
    if sinks is not None:
        sinks = sinks.view(kv_heads, -1).t()[:, :, None, None]
    out = _attend(grouped, k, v, row.mask, scale, softcap, sinks)
    return out.permute(2, 1, 0, 3).reshape(count, -1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax attention over [batch, heads, queries, head_dim]; without a mask it is causal over as many keys as
    queries. `sinks` broadcasts against the scores [batch, heads, queries, keys]."""
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
    scores = q @ k.transpose(-1, -2)
    scores = scores.mul_(scale) if softcap is None else scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is None:
        mask = torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype, device=q.device).triu_(1)
    scores.add_(mask)
    if sinks is None:
        return scores.softmax(-1) @ v
    best = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = scores.sub_(best).exp_()
    return (weights @ v) / (weights.sum(-1, keepdim=True) + (sinks - best).exp())
