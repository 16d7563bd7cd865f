"""Verification by rejection: a draft is accepted with probability min(1, p / q), else another token is drawn.

p and q are the distributions after all processing (penalties, masks, temperature, filters), of the model and of what
drew the draft; q of a draft that was not drawn is 1 at its token. What replaces a rejected draft is drawn from the
positive part of p - q. The tokens then have the distribution p, but are others than without drafts. The draft, its
acceptance and its replacement need noise that is independent, so each has a salt of its own. The runner calls
`choose_tokens_by_rejection` if the engine verifies that way.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.sampling.batch import Batch
from quire.sampling.noise import Noise

# Odd constants that differ in most bits; a noise key combined with one of them is another stream.
DRAFT_SALT = 0x1F83D9ABFB41BD6B
ACCEPT_SALT = 0x3C6EF372FE94F82B
REPLACE_SALT = 0x510E527FADE682D1
TO_UNIT = 2.0**-31


def for_drafting(batch: Batch) -> Batch:
    """Returns the batch with the noise that drafts are drawn with."""
    cohorts = [replace(cohort, key=cohort.key ^ DRAFT_SALT) for cohort in batch.cohorts]
    draws = None if batch.draws is None else replace(batch.draws, key=batch.draws.key ^ DRAFT_SALT)
    return replace(batch, cohorts=cohorts, draws=draws)


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    """Returns the distributions of drafts that were not drawn. tokens [n] -> [n, vocab] float32"""
    rows = torch.zeros(len(tokens), vocab_size, dtype=torch.float32, device=tokens.device)
    return rows.scatter_(1, tokens[:, None], 1.0)


def choose_tokens_by_rejection(
    noise: Noise, model: Tensor, drafts: Tensor, drawn_from: Tensor, keys: Tensor, positions: Tensor
) -> Tensor:
    """Returns the token in the place of each draft: the draft if it is accepted, never the draft if not.

    model [n, vocab]: processed logits; drafts [n]; drawn_from [n, vocab]: q; keys, positions [n]: of the noise -> [n]
    """
    p = torch.softmax(model.float(), 1)
    at_draft = drafts[:, None]
    ratio = (p.gather(1, at_draft) / drawn_from.gather(1, at_draft))[:, 0]  # q is above 0 where a draft was drawn
    first = torch.zeros_like(at_draft)
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    uniform = noise.bits(keys ^ ACCEPT_SALT, positions, first)[:, 0].to(wide) * TO_UNIT  # below 1
    rest = (p - drawn_from).clamp(min=0).scatter(1, at_draft, 0.0)
    # Where nothing is left p and q agree, and the ratio is below 1 by rounding only.
    accepted = (uniform < ratio) | (rest.sum(1) <= 0)
    scores = rest.log() + noise.gumbel(keys ^ REPLACE_SALT, positions)
    return torch.where(accepted, drafts, scores.argmax(1))
