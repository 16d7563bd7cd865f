"""Passes over [rows, vocab] that a row's neighbours cannot change and that are cheap on every device.

Used by the filters and by logprobs. Comparisons land in float tensors because that is the form torch vectorises on
the CPU (several times cheaper than booleans, `where` and `masked_fill`).
"""

from __future__ import annotations

import torch
from torch import Tensor

NOTHING = float("-inf")


def at_least(x: Tensor, floor: Tensor) -> Tensor:
    """1.0 where x [rows, n] >= floor [rows, 1], else 0.0."""
    return torch.ge(x, floor, out=torch.empty_like(x))


def above(x: Tensor, floor: Tensor) -> Tensor:
    """1.0 where x [rows, n] > floor [rows, 1], else 0.0."""
    return torch.gt(x, floor, out=torch.empty_like(x))


def row_sums(x: Tensor) -> Tensor:
    """Sum of each row, [rows, n] -> [rows, 1]. Two halves first: torch would otherwise split a lone row among threads,
    and the same row would sum to something else alone than in a batch."""
    half = x.shape[1] // 2
    sums = x[:, : 2 * half].unflatten(1, (2, half)).sum(-1).sum(-1, keepdim=True)
    return sums if x.shape[1] % 2 == 0 else sums + x[:, 2 * half :]


def drop_below(x: Tensor, floor: Tensor) -> Tensor:
    """x [rows, n] with -inf for all that lies below floor [rows, 1]."""
    return minus_inf_unless(at_least(x, floor)).add_(x)


def minus_inf_unless(kept: Tensor) -> Tensor:
    """What to add so that only the cells marked 1.0 remain: 0 for them, -inf for those marked 0.0. Works in place.
    (`log` would do the same in one pass, but its way to -inf is some twenty times slower on the CPU.)"""
    return torch.threshold_(kept.sub_(1.0), -0.5, NOTHING)


def select(x: Tensor, samples: Tensor | None) -> Tensor:
    """The samples named, or x itself when that is all of them."""
    return x if samples is None else x.index_select(0, samples)
