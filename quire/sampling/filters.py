"""Sampling filters: temperature, then top-k, top-n-sigma, top-p and min-p. Called by the sampler.

Each filter keeps the tokens above a floor, so several filters keep those above the highest floor. Tokens tied with the
last one kept are kept too. Scaled logits are called scores here; the best score of a row is 0 and all others are below,
so exp(score) is a probability up to a constant.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.sampling.batch import EVERYTHING, UNFILTERED, Cohort
from quire.sampling.rowwise import MINUS_INF, at_least, drop_below, row_sums

_ONE = 2.0**40  # weight of the best token in the integer arithmetic of top-p
_NEGLIGIBLE = -30.0  # scores whose weight rounds to 0
_NUM_BINS = 4096
_ALMOST_ALL = 1 - 1e-7
_ROUNDING = 1e-6  # margin for the float32 rounding of the last bin's edge, so that no token falls below its own bin


def apply_filters(logits: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor | None]:
    """Returns scores with -inf for tokens that are filtered out, and their token ids: [rows, candidates] each, or
    [rows, vocab] and None.

    Top-p sums probabilities after temperature over the tokens that top-k and sigma keep. Sigma is the deviation of all
    of the row's finite logits, so its order relative to top-k makes no difference."""
    scale = cohort.inv_temperature[:, None]
    sigma_floor = None
    if cohort.any_sigma:
        width = cohort.top_n_sigma[:, None]
        sigma_floor = torch.where(width > 0, -width * _deviation(logits) * scale, MINUS_INF)
    if cohort.width in (EVERYTHING, UNFILTERED):
        scores = (logits - logits.amax(1, keepdim=True)).mul_(scale)
        scores.nan_to_num_(nan=0.0, neginf=MINUS_INF)  # NaN of bad rows would become indices out of range
        return _keep_of_all(scores, cohort, sigma_floor), None
    best = logits.topk(cohort.width)
    scores = (best.values - best.values[:, :1]) * scale
    return _keep_of_candidates(scores, cohort, sigma_floor), best.indices


def _keep_of_candidates(scores: Tensor, cohort: Cohort, sigma_floor: Tensor | None) -> Tensor:
    """Filters `scores` [rows, candidates], which are sorted in descending order."""
    floor = scores.gather(1, cohort.top_k[:, None] - 1)
    if sigma_floor is not None:
        floor = torch.maximum(floor, sigma_floor)
    if cohort.any_top_p:
        weights = torch.where(scores >= floor, scores, MINUS_INF).to(cohort.top_p.dtype).exp_()
        reached = weights.cumsum(1)
        num_kept = (reached - weights < cohort.top_p[:, None] * reached[:, -1:]).sum(1, keepdim=True)
        cut = scores.gather(1, num_kept.clamp(min=1) - 1)
        floor = torch.maximum(floor, torch.where(cohort.top_p[:, None] < 1, cut, MINUS_INF))
    if cohort.any_min_p:
        floor = torch.maximum(floor, cohort.min_p[:, None].log())
    return torch.where(scores >= floor, scores, MINUS_INF)


def _keep_of_all(scores: Tensor, cohort: Cohort, sigma_floor: Tensor | None) -> Tensor:
    """Filters `scores` [rows, vocab], in order of token id, without sorting."""
    if sigma_floor is not None:
        scores = drop_below(scores, sigma_floor)
    if cohort.any_top_p:
        scores = drop_below(scores, _top_p_floor(scores, cohort.top_p[:, None]))
    if cohort.any_min_p:
        scores = drop_below(scores, cohort.min_p[:, None].log())
    return scores


def _top_p_floor(scores: Tensor, top_p: Tensor) -> Tensor:
    """Returns the highest floor [rows, 1] above which at least a top_p share of the probability lies.

    Probabilities are summed into bins of equal width by score, then the bin in which the share is reached is divided
    into bins again: two passes instead of a sort, without a device synchronization. Sums are of integers, so they are
    exact in any order. Tokens in the same final bin (some 1e-6 apart) count as tied.
    """
    place = scores.clamp(min=_NEGLIGIBLE)  # reused as a buffer: new memory costs more than a pass on the CPU
    weights = place.exp_().mul_(_ONE).to(torch.int64)
    target = (top_p * weights.sum(1, keepdim=True)).ceil_().to(torch.int64)
    # The last token kept is at least as likely as the average token beyond top_p, which bounds its score from below.
    width = (math.log(scores.shape[1]) - torch.log1p(-top_p.clamp(max=_ALMOST_ALL))).to(torch.float32) + 1e-3
    top = torch.zeros_like(width)
    bins = torch.empty_like(weights)
    sums = torch.empty(len(scores), _NUM_BINS + 2, dtype=torch.int64, device=scores.device)
    for _ in range(2):
        # Bin 0 holds all above the range and the last bin all below, so running sums start at the most likely token.
        torch.sub(top, scores, out=place).mul_(_NUM_BINS / width).add_(1.0).clamp_(0.0, _NUM_BINS + 1.0)
        reached = sums.zero_().scatter_add_(1, bins.copy_(place), weights).cumsum_(1)
        cut = torch.searchsorted(reached, target)  # the first bin that reaches the target
        width = width / _NUM_BINS
        top = top - (cut - 1) * width
    floor = top - width - _ROUNDING
    return torch.where(top_p < 1, floor, MINUS_INF)


def _deviation(logits: Tensor) -> Tensor:
    """Returns the population standard deviation of each row's finite logits, [rows, 1]."""
    finite = at_least(logits, torch.full_like(logits[:, :1], torch.finfo(logits.dtype).min))
    count = row_sums(finite)
    # -inf * 0 would be NaN, so infinite logits are clamped before the multiplication that removes them.
    below_best = (logits - logits.amax(1, keepdim=True)).clamp_(min=torch.finfo(logits.dtype).min).mul_(finite)
    from_mean = below_best.sub_(row_sums(below_best) / count).mul_(finite)
    return (row_sums(from_mean.square_()) / count).sqrt_()
