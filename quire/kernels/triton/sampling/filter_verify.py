"""The check of samples whose rows keep too many tokens to list, the last kernel of `filters`."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.launch import compute_cache_keys, let_next_start, wait_for_inputs
from quire.kernels.triton.sampling.filter_parts import NUM_STATS, VERIFY, _deviation, _draw, _load_filters
from quire.kernels.triton.sampling.logits import bits_to_distance, find_row, load_distances, load_logits


@triton.jit
def _top_k_cut(row, top_k, best, scale, vocab_size, EDITED: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    """Distance of the k-th token below the best, found bit by bit with one pass over the row each."""
    found = tl.full([], 0, tl.int32)
    for index in range(31):
        bit = tl.full([], 1 << 30, tl.int32) >> index
        counts = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, vocab_size, BLOCK):
            _, distances = load_distances(row, start, best, scale, vocab_size, EDITED, HAS_MASK, BLOCK)
            counts += (distances.to(tl.int32, bitcast=True) <= found + (bit - 1)).to(tl.int32)
        found = tl.where(tl.sum(counts, 0) >= top_k, found, found + bit)
    return bits_to_distance(found)


@triton.jit
def _above(row, cut, best, scale, vocab_size, EDITED: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    """Number and total weight of the tokens nearer to the best than `cut`."""
    counts = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK):
        _, distances = load_distances(row, start, best, scale, vocab_size, EDITED, HAS_MASK, BLOCK)
        counts += (distances < cut).to(tl.int32)
        sums += tl.where(distances < cut, tl.exp(-distances), 0.0)
    return tl.sum(counts, 0), tl.sum(sums, 0)


@triton.jit
def _draw_above(
    row,
    cut,
    best,
    scale,
    key,
    position,
    vocab_size,
    EDITED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sample a token from those nearer to the best than `cut`."""
    highest = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        token_ids, distances = load_distances(row, start, best, scale, vocab_size, EDITED, HAS_MASK, BLOCK)
        score, drawn = _draw(tl.where(distances < cut, distances, float("inf")), token_ids, key, position, FAST)
        token = tl.where(score > highest, drawn, token)
        highest = tl.maximum(score, highest)
    return token


@triton.jit
def _verify_kernel(
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
    stats_ptr,
    best_ptr,
    todo_ptr,
    total_ptr,
    out_token_ptr,
    logits_stride,
    copies_stride,
    mask_stride,
    vocab_size,
    num_tiles,
    EDITED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row that sampled from more tokens than its filters may keep. Counts the tokens above the sampled
    one and, while they are too many, samples again from them. Each iteration removes about half of the excess."""
    let_next_start(PDL)
    sample = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    if tl.load(todo_ptr + sample) == VERIFY:
        scale, top_k, top_p, _, sigma, _ = _load_filters(
            sample, inv_temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, sigma_ptr
        )
        best = tl.load(best_ptr + sample)
        total = tl.load(total_ptr + sample)
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
        if (top_p < 1) & ((top_k > 0) | (sigma > 0)):
            # top-p's share is of what top-k and sigma keep, so their exact cut is needed here.
            cut = tl.full([], float("inf"), tl.float32)
            if top_k > 0:
                cut = _top_k_cut(row, top_k, best, scale, vocab_size, EDITED, HAS_MASK, BLOCK)
            if sigma > 0:
                tiles = tl.arange(0, TILES)
                stats = stats_ptr + (sample * num_tiles + tiles) * NUM_STATS
                cut = tl.minimum(cut, sigma * _deviation(stats, tiles < num_tiles) * scale)
            just_beyond = (cut.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
            beyond = tl.where(cut < float("inf"), just_beyond, cut)
            total = _above(row, beyond, best, scale, vocab_size, EDITED, HAS_MASK, BLOCK)[1]
        key = tl.load(key_ptr + sample)
        position = tl.load(positions_ptr + sample)
        token = tl.load(out_token_ptr + sample).to(tl.int32)
        seeking = tl.full([], 1, tl.int32)
        while seeking != 0:
            cut = (best - load_logits(row, token, True, EDITED)) * scale
            count, weight = _above(row, cut, best, scale, vocab_size, EDITED, HAS_MASK, BLOCK)
            fits = ((top_k == 0) | (count < top_k)) & ((top_p >= 1) | (weight < top_p * total))
            seeking = tl.where(fits | (count == 0), 0, 1)
            if seeking != 0:
                token = _draw_above(row, cut, best, scale, key, position, vocab_size, EDITED, HAS_MASK, BLOCK, FAST)
        tl.store(out_token_ptr + sample, token.to(tl.int64))


compute_cache_keys(globals())
