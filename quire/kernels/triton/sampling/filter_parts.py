"""Shared functions and constants of the kernels that sample under filters (`filters`, `filter_verify`)."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.launch import compute_cache_keys
from quire.kernels.triton.sampling.sample import TO_UNIT, add_gumbel, noise_bits, row_words

NUM_STATS = tl.constexpr(5)  # per tile: largest, sum of weights; of finite logits count, mean, squared deviations

DONE = tl.constexpr(0)
CHOOSE = tl.constexpr(1)  # sample from what lies within the limit
VERIFY = tl.constexpr(2)  # ... and then check whether top-k and top-p keep the token


@triton.jit
def _load_filters(sample, inv_temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, sigma_ptr):
    """A sample's inverse temperature and filters, and whether any filter is active."""
    scale = tl.load(inv_temperature_ptr + sample)
    top_k = tl.load(top_k_ptr + sample).to(tl.int32)
    top_p = tl.load(top_p_ptr + sample).to(tl.float32)
    min_p = tl.load(min_p_ptr + sample)
    sigma = tl.load(sigma_ptr + sample)
    filtered = (scale > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0) | (sigma > 0))
    return scale, top_k, top_p, min_p, sigma, filtered


@triton.jit
def _deviation(stats, there):
    """Standard deviation of all the row's finite logits, combined from its tiles."""
    count = tl.load(stats + 2, mask=there, other=0.0)
    mean = tl.load(stats + 3, mask=there, other=0.0)
    squares = tl.load(stats + 4, mask=there, other=0.0)
    total = tl.sum(count, 0)
    from_mean = mean - tl.sum(count * mean, 0) / total
    return tl.sqrt(tl.sum(squares + count * from_mean * from_mean, 0) / total)


@triton.jit
def _draw(distances, token_ids, key, position, FAST: tl.constexpr):
    """The best score after noise and its token; infinite distances are never sampled."""
    whiten, multiply = row_words(key, position)
    scores = add_gumbel(-distances, noise_bits(token_ids, whiten, multiply).to(tl.float32) * TO_UNIT, FAST)
    best = tl.max(scores)
    return best, tl.min(tl.where(scores == best, token_ids, 0x7FFFFFFF))


compute_cache_keys(globals())
