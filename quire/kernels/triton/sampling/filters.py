"""Sampling with top-k, top-p, min-p and top-n-sigma without a sort; implements `quire.sampling.filters` and the draw.

One pass over the logits finds the best of every 32 tokens. All tokens above the best of the first group that is not
listed are in listed groups, so one program per row reads the best 256 groups again, finds the exact cuts among their
tokens and samples; a model's logits nearly always allow that. A row that keeps more tokens samples from all of them
instead (`sample_rows`), and then checks whether the sampled token is among those kept; if not, it samples again from
the tokens above. The best of all is the best of those kept if it is one of them, so the result is the same.

All cuts are distances below the best: (best - logit) * inv_temperature. Tiles have a fixed length, so that a row's sums
are the same in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import INTERPRETED, compute_cache_keys, launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.sampling.filter_parts import (
    CHOOSE,
    DONE,
    NUM_STATS,
    VERIFY,
    _deviation,
    _draw,
    _load_filters,
)
from quire.kernels.triton.sampling.filter_verify import _verify_kernel
from quire.kernels.triton.sampling.logits import GROUP, bits_to_distance, find_row, load_groups, reach
from quire.kernels.triton.sampling.sample import SamplingLimits, sample_rows

TILE_GROUPS = 128 if not INTERPRETED else 16
LISTED = 256 if not INTERPRETED else 16  # groups that are read again
VERIFY_BLOCK = 8192 if not INTERPRETED else 1024


@triton.jit
def _survey_kernel(
    logits_ptr,
    copies_ptr,
    places_ptr,
    mask_ptr,
    inv_temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    sigma_ptr,
    group_best_ptr,
    stats_ptr,
    logits_stride,
    copies_stride,
    mask_stride,
    vocab_size,
    EDITED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one tile of one row. Stores the best of each group (+inf if it contains NaN or +inf), and the sums
    that the row's filters need."""
    let_next_start(PDL)
    tile = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    wait_for_inputs(PDL)
    scale, top_k, top_p, _, sigma, filtered = _load_filters(
        sample, inv_temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, sigma_ptr
    )
    if filtered:
        row = find_row(
            logits_ptr,
            logits_stride,
            copies_ptr,
            copies_stride,
            places_ptr,
            mask_ptr,
            mask_stride,
            sample,
            EDITED,
            HAS_MASK,
        )
        groups = tile * GROUPS + tl.arange(0, GROUPS)
        logits, unfit = load_groups(row, groups, groups >= 0, vocab_size, EDITED, HAS_MASK)
        best = tl.where(unfit != 0, float("inf"), tl.max(logits, 1))
        num_tiles = tl.num_programs(0)
        tl.store(group_best_ptr + sample * (num_tiles * GROUPS) + groups, best)
        stats = stats_ptr + (sample * num_tiles + tile) * NUM_STATS
        top = tl.max(best, 0)
        tl.store(stats, top)
        if (top_p < 1) & (top_k == 0) & (sigma == 0):
            from_top = tl.where(top > float("-inf"), logits - top, float("-inf"))
            tl.store(stats + 1, tl.sum(tl.exp(from_top * scale)))
        if sigma > 0:
            finite = logits > float("-inf")
            count = tl.sum(finite.to(tl.float32))
            mean = tl.sum(tl.where(finite, logits, 0.0)) / tl.maximum(count, 1.0)
            from_mean = tl.where(finite, logits - mean, 0.0)
            tl.store(stats + 2, count)
            tl.store(stats + 3, mean)
            tl.store(stats + 4, tl.sum(from_mean * from_mean))


@triton.jit
def _total_weight(stats, there, best, scale):
    """Sum of the row's weights relative to `best`, from the sums of its tiles."""
    tops = tl.load(stats, mask=there, other=float("-inf"))
    sums = tl.load(stats + 1, mask=there, other=0.0)
    return tl.sum(sums * tl.exp((tops - best) * scale), 0)


@triton.jit
def _kept(
    row,
    listed,
    there,
    edge,
    best,
    scale,
    top_k,
    top_p,
    sigma_limit,
    min_limit,
    total,
    vocab_size,
    EDITED: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """The tokens of these groups, their distances below the best (infinite for those not kept), and whether the result
    is exact: only groups nearer than `edge` are complete here, so the cuts must lie below it."""
    logits, _ = load_groups(row, listed, there, vocab_size, EDITED, HAS_MASK)
    cells = (best - logits) * scale
    base = sigma_limit  # the limit within which top-p takes its share
    if top_k > 0:
        base = tl.minimum(base, bits_to_distance(reach(cells, 1, top_k)))
    cut = tl.minimum(base, min_limit)
    known = True
    if top_p < 1:
        weights = tl.where(cells <= base, tl.exp(-cells), 0.0)
        share = total
        if (top_k > 0) | (sigma_limit < float("inf")):
            share = tl.sum(weights)
            known = base < edge
        cut = tl.minimum(cut, bits_to_distance(reach(cells, weights, top_p * share)))
    known = (known & (cut < edge)) | (edge == float("inf"))
    cells = tl.where(cells <= cut, cells, float("inf"))
    return listed[:, None] * GROUP + tl.arange(0, GROUP)[None, :], cells, known


@triton.jit
def _narrow_kernel(
    logits_ptr,
    copies_ptr,
    places_ptr,
    mask_ptr,
    inv_temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    sigma_ptr,
    key_ptr,
    positions_ptr,
    group_best_ptr,
    stats_ptr,
    list_ptr,
    best_ptr,
    limit_ptr,
    todo_ptr,
    total_ptr,
    out_token_ptr,
    out_bad_ptr,
    logits_stride,
    copies_stride,
    mask_stride,
    vocab_size,
    num_groups,
    num_tiles,
    EDITED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    LISTED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. Lists the row's best groups, and samples if all tokens it keeps are among them."""
    let_next_start(PDL)
    sample = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    scale, top_k, top_p, min_p, sigma, filtered = _load_filters(
        sample, inv_temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, sigma_ptr
    )
    best = tl.full([], 0.0, tl.float32)
    limit = tl.full([], float("inf"), tl.float32)
    todo = tl.full([], CHOOSE, tl.int32)
    total = tl.full([], 0.0, tl.float32)
    if filtered:
        groups = tl.arange(0, GROUPS)
        group_best = tl.load(
            group_best_ptr + sample * num_groups + groups, mask=groups < num_groups, other=float("-inf")
        )
        best = tl.max(group_best, 0)
        if (best == float("inf")) | (best == float("-inf")):
            todo = tl.full([], DONE, tl.int32)
            tl.store(out_token_ptr + sample, 0)
            tl.store(out_bad_ptr + sample, True)
        else:
            tiles = tl.arange(0, TILES)
            stats = stats_ptr + (sample * num_tiles + tiles) * NUM_STATS
            sigma_limit = tl.full([], float("inf"), tl.float32)
            if sigma > 0:
                sigma_limit = sigma * _deviation(stats, tiles < num_tiles) * scale
            min_limit = tl.where(min_p > 0, -tl.log(tl.maximum(min_p, 1e-37)), float("inf"))
            limit = tl.minimum(sigma_limit, min_limit)
            if (top_p < 1) & (top_k == 0) & (sigma == 0):
                total = _total_weight(stats, tiles < num_tiles, best, scale)
            # The nearest groups, as many as can be listed; groups that tie with the first omitted one are omitted too.
            distances = (best - group_best) * scale
            edge = bits_to_distance(reach(distances, 1, LISTED + 1))
            within = distances < edge
            order = tl.cumsum(within.to(tl.int32), 0) - 1
            tl.store(list_ptr + sample * LISTED + order, groups, mask=within)
            tl.debug_barrier()  # the list is read by other threads than those that wrote it
            lanes = tl.arange(0, LISTED)
            there = lanes < tl.sum(within.to(tl.int32), 0)
            listed = tl.load(list_ptr + sample * LISTED + lanes, mask=there, other=0)
            row = find_row(
                logits_ptr,
                logits_stride,
                copies_ptr,
                copies_stride,
                places_ptr,
                mask_ptr,
                mask_stride,
                sample,
                EDITED,
                HAS_MASK,
            )
            token_ids, cells, known = _kept(
                row,
                listed,
                there,
                edge,
                best,
                scale,
                top_k,
                top_p,
                sigma_limit,
                min_limit,
                total,
                vocab_size,
                EDITED,
                HAS_MASK,
            )
            if known:
                todo = tl.full([], DONE, tl.int32)
                _, token = _draw(cells, token_ids, tl.load(key_ptr + sample), tl.load(positions_ptr + sample), FAST)
                tl.store(out_token_ptr + sample, token.to(tl.int64))
                tl.store(out_bad_ptr + sample, False)
            else:
                todo = tl.where((top_k > 0) | (top_p < 1), VERIFY, CHOOSE)
    tl.store(best_ptr + sample, best)
    tl.store(limit_ptr + sample, limit)
    tl.store(todo_ptr + sample, todo)
    tl.store(total_ptr + sample, total)


def sample_filtered(
    logits: Tensor,
    key: Tensor,
    positions: Tensor,
    inv_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_n_sigma: Tensor,
    *,
    mask: Tensor | None = None,
    edited: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `sample_rows`, for samples of which some have filters, all [samples]: `top_k` int64 (0: off), `top_p` float64
    (1: off), `min_p` and `top_n_sigma` float32 (0: off). Filters are ignored where the inverse temperature is 0. A
    sample without filters costs no more than reading its flags."""
    num_samples, vocab_size = logits.shape
    device = logits.device
    num_tiles = triton.cdiv(vocab_size, TILE_GROUPS * GROUP.value)
    num_groups = num_tiles * TILE_GROUPS
    tokens = torch.empty(num_samples, dtype=torch.int64, device=device)
    bad = torch.empty(num_samples, dtype=torch.bool, device=device)
    group_best = torch.empty(num_samples, num_groups, dtype=torch.float32, device=device)
    stats = torch.empty(num_samples, num_tiles, NUM_STATS.value, dtype=torch.float32, device=device)
    listed = torch.empty(num_samples, LISTED, dtype=torch.int32, device=device)
    best, limit, total = (torch.empty(num_samples, dtype=torch.float32, device=device) for _ in range(3))
    todo = torch.empty(num_samples, dtype=torch.int32, device=device)
    source = (logits, *(edited or (None, None)), mask, inv_temperature, top_k, top_p, min_p, top_n_sigma)
    strides = (logits.stride(0), edited[0].stride(0) if edited else 0, 0 if mask is None else mask.stride(0))
    flags = {"EDITED": edited is not None, "HAS_MASK": mask is not None}
    tiles = triton.next_power_of_2(num_tiles)
    _survey_kernel[(num_tiles, num_samples)](
        *source,
        group_best,
        stats,
        *strides,
        vocab_size,
        **flags,
        GROUPS=TILE_GROUPS,
        **launch_options(device, num_warps=8),
    )
    _narrow_kernel[(num_samples,)](
        *source,
        key,
        positions,
        group_best,
        stats,
        listed,
        best,
        limit,
        todo,
        total,
        tokens,
        bad,
        *strides,
        vocab_size,
        num_groups,
        num_tiles,
        **flags,
        GROUPS=triton.next_power_of_2(num_groups),
        TILES=tiles,
        LISTED=LISTED,
        FAST=not INTERPRETED,
        **launch_options(device, num_warps=16),
    )
    sample_rows(
        logits,
        key,
        positions,
        inv_temperature,
        mask=mask,
        edited=edited,
        limits=SamplingLimits(best, limit, todo),
        out=(tokens, bad),
    )
    _verify_kernel[(num_samples,)](
        *source,
        key,
        positions,
        stats,
        best,
        todo,
        total,
        tokens,
        *strides,
        vocab_size,
        num_tiles,
        **flags,
        TILES=tiles,
        BLOCK=VERIFY_BLOCK,
        FAST=not INTERPRETED,
        **launch_options(device, num_warps=16),
    )
    return tokens, bad


compute_cache_keys(globals())
