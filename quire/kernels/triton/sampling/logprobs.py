"""Log-probability, rank and best alternatives of one token per row; implements `quire.sampling.logprobs.score`.

One pass over the logits sums weights, counts the tokens above the chosen one and keeps the largest of every 32 tokens.
The n best tokens are in the n best groups, so the rest is one small program per row, without a sort. Equal alternatives
are ordered by id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import INTERPRETED, compute_cache_keys, launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.sampling.logits import GROUP, find_row, load_groups, reach

TILE_GROUPS = 128 if not INTERPRETED else 16
NUM_STATS = tl.constexpr(3)  # per tile: largest, sum of weights relative to it, number of tokens above the chosen one


@triton.jit
def _score_tiles_kernel(
    logits_ptr,
    samples_ptr,
    token_ids_ptr,
    group_best_ptr,
    stats_ptr,
    logits_stride,
    vocab_size,
    SOME: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one tile of one sample. Stores each group's best, and the tile's sums."""
    let_next_start(PDL)
    tile = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    num_tiles = tl.num_programs(0)
    wait_for_inputs(PDL)
    sample = index
    if SOME:
        sample = tl.load(samples_ptr + index)
    token = tl.load(token_ids_ptr + sample)
    chosen = tl.load(logits_ptr + sample * logits_stride + token).to(tl.float32)
    groups = tile * GROUPS + tl.arange(0, GROUPS)
    row = find_row(logits_ptr, logits_stride, None, 0, None, None, 0, sample, False, False)
    logits, _ = load_groups(row, groups, groups >= 0, vocab_size, False, False)
    logits = tl.where(logits == logits, logits, float("-inf"))
    best = tl.max(logits, 1)
    tl.store(group_best_ptr + index * (num_tiles * GROUPS) + groups, best)
    top = tl.max(best, 0)
    stats = stats_ptr + (index * num_tiles + tile) * NUM_STATS
    tl.store(stats, top)
    tl.store(stats + 1, tl.sum(tl.exp(tl.where(top > float("-inf"), logits - top, float("-inf")))))
    tl.store(stats + 2, tl.sum((logits > chosen).to(tl.int32)).to(tl.float32))


@triton.jit(do_not_specialize=["num_top"])
def _score_rows_kernel(
    logits_ptr,
    samples_ptr,
    token_ids_ptr,
    group_best_ptr,
    stats_ptr,
    list_ptr,
    out_token_ptr,
    logprob_ptr,
    rank_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    logits_stride,
    vocab_size,
    num_groups,
    num_tiles,
    num_top,
    SOME: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: log-probability, rank and best alternatives of one sample, from its tiles."""
    let_next_start(PDL)
    index = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    sample = index
    if SOME:
        sample = tl.load(samples_ptr + index)
    token = tl.load(token_ids_ptr + sample)
    chosen = tl.load(logits_ptr + sample * logits_stride + token).to(tl.float32)
    tiles = tl.arange(0, TILES)
    stats = stats_ptr + (index * num_tiles + tiles) * NUM_STATS
    tops = tl.load(stats, mask=tiles < num_tiles, other=float("-inf"))
    sums = tl.load(stats + 1, mask=tiles < num_tiles, other=0.0)
    above = tl.load(stats + 2, mask=tiles < num_tiles, other=0.0)
    best = tl.max(tops, 0)
    log_total = best + tl.log(tl.sum(sums * tl.exp(tops - best), 0))
    tl.store(out_token_ptr + index, token)
    tl.store(logprob_ptr + index, chosen - log_total)
    tl.store(rank_ptr + index, tl.sum(above.to(tl.int32), 0).to(tl.int64) + 1)
    if num_top > 0:
        groups = tl.arange(0, GROUPS)
        exists = groups * GROUP < vocab_size
        group_best = tl.load(group_best_ptr + index * num_groups + groups, mask=exists, other=float("-inf"))
        distances = tl.where(group_best == best, 0.0, best - group_best)
        distances = tl.where(distances == distances, distances, 0.0)  # a bad row: any groups will do
        span = reach(tl.where(exists, distances, float("inf")), 1, num_top)
        keys = distances.to(tl.int32, bitcast=True)
        # All groups nearer than the last one needed, and as many of those that tie with it as could be needed.
        ties = exists & (keys == span)
        taken = (exists & (keys < span)) | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= num_top))
        order = tl.cumsum(taken.to(tl.int32), 0) - 1
        num_listed = tl.sum(taken.to(tl.int32), 0)
        tl.store(list_ptr + index * LISTED + order, groups, mask=taken & (order < LISTED))
        tl.debug_barrier()  # the list is read by other threads than those that wrote it
        lanes = tl.arange(0, LISTED)
        listed = tl.load(list_ptr + index * LISTED + lanes, mask=lanes < num_listed, other=0)
        row = find_row(logits_ptr, logits_stride, None, 0, None, None, 0, sample, False, False)
        logits, _ = load_groups(row, listed, lanes < num_listed, vocab_size, False, False)
        logits = tl.where(logits == logits, logits, float("-inf"))
        ids = listed[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        ids = tl.where((lanes < num_listed)[:, None] & (ids < vocab_size), ids, 0x7FFFFFFF)
        for place in range(num_top):
            highest = tl.max(tl.where(ids < 0x7FFFFFFF, logits, float("-inf")))
            found = tl.min(tl.where(logits == highest, ids, 0x7FFFFFFF))
            ids = tl.where(ids == found, 0x7FFFFFFF, ids)
            tl.store(top_ids_ptr + index * num_top + place, tl.where(found < 0x7FFFFFFF, found, 0).to(tl.int64))
            tl.store(top_logprobs_ptr + index * num_top + place, highest - log_total)


def score_rows(logits: Tensor, samples: Tensor | None, token_ids: Tensor, num_top: int) -> tuple[Tensor, ...]:
    """For the samples `samples` [n] of `logits` [samples, vocab] (None: all): the token each has chosen (`token_ids`
    [samples]), its log-probability [n] float32, its rank [n] int64 (1 + the number of strictly more likely tokens), and
    the `num_top` most likely ids [n, num_top] int64 with their log-probabilities, best first."""
    vocab_size, device = logits.shape[1], logits.device
    count = len(logits) if samples is None else len(samples)
    num_top = min(num_top, vocab_size)
    num_tiles = triton.cdiv(vocab_size, TILE_GROUPS * GROUP.value)
    num_groups = num_tiles * TILE_GROUPS
    listed = 2 * triton.next_power_of_2(max(num_top, 4))
    group_best = torch.empty(count, num_groups, dtype=torch.float32, device=device)
    stats = torch.empty(count, num_tiles, NUM_STATS.value, dtype=torch.float32, device=device)
    lists = torch.empty(count, listed, dtype=torch.int32, device=device)
    out = (
        torch.empty(count, dtype=torch.int64, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.int64, device=device),
        torch.empty(count, num_top, dtype=torch.int64, device=device),
        torch.empty(count, num_top, dtype=torch.float32, device=device),
    )
    if not count:
        return out
    some = samples is not None
    _score_tiles_kernel[(num_tiles, count)](
        logits,
        samples,
        token_ids,
        group_best,
        stats,
        logits.stride(0),
        vocab_size,
        SOME=some,
        GROUPS=TILE_GROUPS,
        **launch_options(device, num_warps=8),
    )
    _score_rows_kernel[(count,)](
        logits,
        samples,
        token_ids,
        group_best,
        stats,
        lists,
        *out,
        logits.stride(0),
        vocab_size,
        num_groups,
        num_tiles,
        num_top,
        SOME=some,
        GROUPS=triton.next_power_of_2(num_groups),
        TILES=triton.next_power_of_2(num_tiles),
        LISTED=listed,
        **launch_options(device, num_warps=16),
    )
    return out


compute_cache_keys(globals())
