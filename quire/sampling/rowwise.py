"""Passes over [rows, vocab] whose results for a row do not depend on other rows, cheap on every device.

The filters and logprobs use them. Comparisons write float tensors because torch vectorises those on the CPU, which is
several times cheaper than booleans, `where` and `masked_fill`.
"""

from __future__ import annotations

import torch
from torch import Tensor

MINUS_INF = float("-inf")


def at_least(x: Tensor, floor: Tensor) -> Tensor:
    """Returns 1.0 where x [rows, n] >= floor [rows, 1], else 0.0."""
    return torch.ge(x, floor, out=torch.empty_like(x))


def above(x: Tensor, floor: Tensor) -> Tensor:
    """Returns 1.0 where x [rows, n] > floor [rows, 1], else 0.0."""
    return torch.gt(x, floor, out=torch.empty_like(x))


def row_sums(x: Tensor) -> Tensor:
    """Sums each row, [rows, n] -> [rows, 1]. Two halves are summed first: torch would otherwise split a single row over
    threads, and its sum would differ from the same row's in a batch."""
    half = x.shape[1] // 2
    sums: Tensor = x[:, : 2 * half].unflatten(1, (2, half)).sum(-1).sum(-1, keepdim=True)
    return sums if x.shape[1] % 2 == 0 else sums + x[:, 2 * half :]


def drop_below(x: Tensor, floor: Tensor) -> Tensor:
    """Returns x [rows, n] with -inf for all values below floor [rows, 1]."""
    return minus_inf_unless(at_least(x, floor)).add_(x)


def minus_inf_unless(kept: Tensor) -> Tensor:
    """Turns 1.0 into 0 and 0.0 into -inf in place, as an addend that forbids the latter cells. `log` would do the same
    in one pass, but is some twenty times slower for zeros on the CPU."""
    return torch.threshold_(kept.sub_(1.0), -0.5, MINUS_INF)


def select(x: Tensor, samples: Tensor | None) -> Tensor:
    """Returns these samples of x, or x itself if `samples` is None, which means all."""
    return x if samples is None else x.index_select(0, samples)
