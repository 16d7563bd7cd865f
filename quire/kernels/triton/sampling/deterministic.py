"""Sampling with filters in the deterministic mode: one kernel variant, whether or not other rows have a grammar or
edits.

Each combination of mask and edits is a kernel of its own, which may add a row's sums in another order. Here every row
is sampled by the variant that supports both. Sampling without filters needs no such care, because it has no sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.kernels.triton.sampling import filters


def sample_filtered(
    logits: Tensor, *draws: Tensor, mask: Tensor | None = None, edited: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """As `filters.sample_filtered`."""
    num_samples, vocab_size = logits.shape
    whole: dict[str, Any] = {"dtype": torch.int32, "device": logits.device}
    if mask is None:
        mask = torch.full((num_samples, -(-vocab_size // 32)), -1, **whole)
    if edited is None:
        no_copies = torch.full((num_samples,), -1, **whole)
        edited = (torch.empty(1, vocab_size, dtype=torch.float32, device=logits.device), no_copies)
    return filters.sample_filtered(logits, *draws, mask=mask, edited=edited)
