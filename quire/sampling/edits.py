"""Logit edits in the sampler's documented order (`apply_edits`): bias, forbidden stop ids, bad words, grammar mask.

Edits run in place on a copy of the logits. A token is forbidden by adding -inf; where only the device knows the
condition, -inf or 0 is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.sampling.batch import BadWords, Batch, Bias, Histories, MinTokens
from quire.sampling.dry import apply_dry
from quire.sampling.penalties import apply_penalties
from quire.sampling.rowwise import MINUS_INF, minus_inf_unless


def apply_edits(logits: Tensor, batch: Batch, histories: Histories, mask: Tensor | None = None) -> Tensor:
    """Applies steps 2 to 7 of the sampler's order to a copy; returns the logits themselves if there is no edit."""
    if not batch.edits and mask is None:
        return logits
    edited = logits.clone(memory_format=torch.contiguous_format)
    tokens, rows, lengths = histories.tokens, histories.rows, histories.lengths
    if batch.bias is not None:
        add_bias(edited, batch.bias)
    if batch.penalties is not None:
        max_len = histories.max_len(batch.penalties.host_samples)
        apply_penalties(edited, batch.penalties, tokens, lengths, rows, max_len)
    if batch.dry is not None:
        apply_dry(edited, batch.dry, tokens, lengths, rows, histories.max_len(batch.dry.host_samples))
    if batch.min_tokens is not None:
        forbid_stops(edited, batch.min_tokens, lengths)
    if batch.bad_words is not None:
        forbid_bad_words(edited, batch.bad_words, tokens, lengths, rows)
    if mask is not None:
        apply_mask(edited, mask)
    return edited


def add_bias(logits: Tensor, bias: Bias) -> None:
    logits.view(-1).scatter_add_(0, bias.cells, bias.values)


def forbid_stops(logits: Tensor, params: MinTokens, lengths: Tensor) -> None:
    """Forbids stop ids in rows below min_tokens. `lengths` [samples]: number of tokens before the sampled one."""
    _forbid(logits, params.cells, lengths[params.owners] < params.until)


def forbid_bad_words(logits: Tensor, params: BadWords, history: Tensor, lengths: Tensor, rows: Tensor) -> None:
    """Forbids each word's last token where the row (prompt and output) ends with the rest of the word."""
    prefix_len = params.prefixes.shape[1]
    back = torch.arange(-prefix_len, 0, device=logits.device)
    places = lengths[params.owners][:, None] + back  # [words, longest prefix]
    before = history[rows[params.owners][:, None], places.clamp(min=0)]
    matches = (params.prefixes < 0) | ((before == params.prefixes) & (places >= 0))
    _forbid(logits, params.cells, matches.all(1))


def apply_mask(logits: Tensor, mask: Tensor) -> None:
    """Forbids all tokens that a grammar does not allow. `mask` is bool [samples, vocab], or packed int32 [samples,
    ceil(vocab / 32)] in which bit i of word w is token 32 * w + i."""
    if mask.dtype == torch.bool:
        allowed = mask.to(torch.float32)
    else:
        bits = mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)
        allowed = (bits & 1).flatten(1)[:, : logits.shape[1]].to(torch.float32)
    logits.add_(minus_inf_unless(allowed))


def _forbid(logits: Tensor, cells: Tensor, when: Tensor) -> None:
    logits.view(-1).scatter_add_(0, cells, torch.where(when, MINUS_INF, 0.0).to(logits.dtype))
