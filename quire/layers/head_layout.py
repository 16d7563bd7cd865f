"""Reorders the elements of query and key heads while loading, so that rope has a single layout.

The rope kernels rotate element i of a head with element i + head_dim / 2. Some checkpoints rotate only the leading
elements of a head (partial rope), some rotate neighbours (interleaved rope). Queries and keys are reordered alike,
which leaves their scores unchanged: each half of a head gets half of the rotated elements, then half of the others,
whose frequency is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.weights import Form, Reorder


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Reorders the rows of a query or key projection, of its bias, or of a head norm's weight."""

    head_dim: int
    rotary_dim: int  # leading elements of a head that rope rotates
    interleaved: bool = False  # the checkpoint rotates 2i with 2i + 1, not i with i + rotary_dim / 2
    angle_scale: float = 1.0  # rope's scale, which is undone here for the elements that rope must leave unchanged
    num_heads: int | None = None  # leading heads to reorder, in a tensor that has values as well; None: all

    @property
    def form(self) -> Form:
        """Returns this order as a form of weights: a `Reorder` if it only reorders, so that blocks stay quantized."""
        return Reorder(self) if self.angle_scale == 1.0 else self

    def __call__(self, rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (-1, self.head_dim))  # [heads, head_dim, ...]
        stop = len(heads) if self.num_heads is None else self.num_heads
        order = head_order(self.head_dim, self.rotary_dim, self.interleaved)
        reordered = heads[:stop][:, order.to(rows.device)]
        if self.angle_scale != 1.0:
            undo = torch.where(order < self.rotary_dim, 1.0, 1.0 / self.angle_scale).to(rows)
            reordered = reordered * undo.view(-1, *(1,) * (reordered.dim() - 2))
        return torch.cat((reordered, heads[stop:])).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class ByHead:
    """Reorders the rows of a fused QKV projection (or bias) from one group per key head to queries, keys, values."""

    num_kv_heads: int
    head_dim: int
    order: HeadOrder | None  # order within queries and keys

    @property
    def form(self) -> Form:
        """Returns this order as a form of weights, as `HeadOrder.form` does."""
        return Reorder(self) if self.order is None or self.order.angle_scale == 1.0 else self

    def __call__(self, rows: Tensor) -> Tensor:
        # [kv_heads, query heads per key head + 2, head_dim, ...]
        groups = rows.unflatten(0, (self.num_kv_heads, -1, self.head_dim))
        parts = groups.split_with_sizes((groups.shape[1] - 2, 1, 1), dim=1)
        merged = torch.cat([part.flatten(0, 2) for part in parts])
        return merged if self.order is None else self.order(merged)


def head_order(head_dim: int, rotary_dim: int, interleaved: bool = False) -> Tensor:
    """Returns, for each element of a reordered head, its index in the checkpoint's head, [head_dim]."""
    elements = torch.arange(head_dim)
    rotated, others = elements[:rotary_dim], elements[rotary_dim:].view(2, -1)
    rotated = rotated.view(-1, 2).t() if interleaved else rotated.view(2, -1)
    return torch.cat((rotated, others), dim=1).flatten()
