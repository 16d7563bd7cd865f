"""Drawing under filters in the deterministic mode: one kernel whether or not a neighbour has a grammar or penalties.

Each combination of these is a kernel of its own, which may take a row's sums in another order. Here a row is always
drawn by the one that knows both. Draws without filters need no such care: they sum nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.kernels.triton.sampling import filters as sample_filters


def sample_filtered(
    logits: Tensor, *draws: Tensor, mask: Tensor | None = None, edited: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """As `sample_filters.sample_filtered`."""
    num_samples, vocab_size = logits.shape
    whole: dict[str, Any] = {"dtype": torch.int32, "device": logits.device}
    if mask is None:
        mask = torch.full((num_samples, -(-vocab_size // 32)), -1, **whole)
    if edited is None:
        nobody = torch.full((num_samples,), -1, **whole)
        edited = (torch.empty(1, vocab_size, dtype=torch.float32, device=logits.device), nobody)
    return sample_filters.sample_filtered(logits, *draws, mask=mask, edited=edited)
