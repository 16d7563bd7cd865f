"""Verification of drafts: counts the drafts of each row that equal the tokens sampled in their places.

Every position is sampled with its own noise, as without drafts, so the accepted tokens and the one after them are those
that would have come one by one. The runner calls this once the step's tokens are sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_DRAFT = -1  # pads `drafts`; no sampled token equals it


def count_accepted(tokens: Tensor, bad: Tensor, firsts: Tensor, drafts: Tensor) -> Tensor:
    """Returns how many drafts of each row are accepted, [rows] int64.

    tokens, bad [samples]; firsts [rows] int64: each row's first sample, the one before its first draft; drafts [rows,
    longest] int64. A draft is also rejected if no token can be sampled after it, which fails the row's next step.
    """
    places = firsts[:, None] + torch.arange(drafts.shape[1], device=drafts.device)  # [rows, longest]
    last = len(tokens) - 1
    sampled, after = tokens[places.clamp(max=last)], bad[(places + 1).clamp(max=last)]
    return ((sampled == drafts) & ~after).cumprod(1).sum(1)


def accepted_tokens(tokens: list[int], drafts: list[int], bad: set[int], first: int) -> list[int]:
    """Returns the tokens that a row gains, on the host. `tokens` and `bad` are those of the step's samples, of which
    the row's begin at `first`."""
    count = 0
    while count < len(drafts) and tokens[first + count] == drafts[count] and first + count + 1 not in bad:
        count += 1
    return tokens[first : first + count + 1]
