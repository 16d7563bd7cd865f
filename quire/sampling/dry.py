"""DRY ("don't repeat yourself") penalty: a token that would continue a repetition is penalised by its length.

The sampler calls it for the rows that use it. If the last m tokens also occur earlier, ending at position i, the token
at i + 1 would continue the repetition: its logit is reduced by multiplier * base ** (m - allowed_len) if m >=
allowed_len, for the longest such m. No match extends across a sequence breaker, and breakers are never penalised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.sampling.batch import Dry
from quire.sampling.noise import mix64

_HASH_BASE = 0x2545F4914F6CDD1D  # any odd number with well-spread bits
_MAX_PENALTY = 1e9  # in effect forbidden, but finite, so that a row with only such tokens can still be sampled


def apply_dry(
    logits: Tensor,
    params: Dry,
    history: Tensor,
    lengths: Tensor,
    rows: Tensor,
    max_len: int,
    logit_rows: Tensor | None = None,
) -> None:
    """Subtracts the penalties from `logits` in place.

    `max_len` is the host's upper bound of the penalised rows' lengths; true lengths stay on the device. `logit_rows`
    [samples]: the row of `logits` of each sample, if that is not the sample's number."""
    vocab_size = logits.shape[1]
    tokens = history[:, :max_len].index_select(0, rows[params.samples]).to(torch.int64)  # [rows, max_len]
    lengths = lengths[params.samples].to(torch.int64)[:, None]  # [rows, 1]
    places = torch.arange(tokens.shape[1], device=tokens.device)
    tokens = torch.where(places < lengths, tokens, 0)

    is_breaker = torch.zeros(len(tokens), vocab_size, dtype=torch.bool, device=tokens.device)
    is_breaker = is_breaker.view(-1).index_fill_(0, params.breaker_cells, True).view(-1, vocab_size).gather(1, tokens)
    after_breaker = torch.where(is_breaker & (places < lengths), places + 1, 0).amax(1, keepdim=True)
    search_start = (lengths - params.search_len[:, None]).clamp(min=0)
    # A match can't begin before the searched range, nor extend back across the last breaker.
    limits = torch.minimum(places + 1 - search_start, lengths - after_breaker)
    limits = torch.where((places < lengths - 1) & (limits > 0), limits, 0)

    match_len = _match_lengths(tokens, lengths, limits)
    exponent = match_len - params.allowed_len[:, None]
    penalty = params.multiplier[:, None] * torch.pow(params.base[:, None], exponent.clamp(min=0).to(torch.float32))
    next_breaker = is_breaker.roll(-1, 1)
    penalty = torch.where((exponent >= 0) & ~next_breaker, penalty.clamp(max=_MAX_PENALTY), 0.0)

    next_tokens = tokens.roll(-1, 1)
    worst = torch.zeros(len(tokens), vocab_size, device=logits.device)
    worst.scatter_reduce_(1, next_tokens, penalty, "amax")
    logits.index_add_(0, params.samples if logit_rows is None else logit_rows[params.samples], worst, alpha=-1)


def _match_lengths(tokens: Tensor, lengths: Tensor, limits: Tensor) -> Tensor:
    """Returns for each position the length of the longest match between the tokens up to it and the row's end, at most
    `limits`. All are [rows, max_len].

    Substrings are compared by rolling hash (sums of mixed ids times powers of an odd number, mod 2**64). The length is
    found by binary search from its highest bit, because a match of m tokens implies shorter ones.
    """
    num_rows, max_len = tokens.shape
    powers = torch.full((max_len,), _HASH_BASE, device=tokens.device)
    powers[0] = 1
    powers = powers.cumprod(0)
    sums = torch.zeros(num_rows, max_len + 1, dtype=torch.int64, device=tokens.device)  # [:, i]: the first i tokens
    torch.cumsum(mix64(tokens + 1) * powers, 1, out=sums[:, 1:])

    ends = torch.arange(1, max_len + 1, device=tokens.device).expand(num_rows, -1)
    row_end = lengths.expand(-1, max_len)
    align = powers[(row_end - ends).clamp(min=0)]  # shifts a substring's hash to the row's end
    sum_here, sum_end = sums.gather(1, ends), sums.gather(1, row_end)
    found = torch.zeros_like(limits)
    for bit in reversed(range(max_len.bit_length())):
        longer = found + (1 << bit)
        back = torch.minimum(longer, limits)
        here = (sum_here - sums.gather(1, ends - back)) * align
        there = sum_end - sums.gather(1, row_end - back)
        found = torch.where((longer <= limits) & (here == there), longer, found)
    return found
