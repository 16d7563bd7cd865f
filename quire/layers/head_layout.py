"""How a checkpoint's heads lie is a matter of loading: rope then needs to know nothing of it.

Our rope turns element i of a head against element i + head_dim / 2. Some checkpoints turn only the first elements of a
head, some turn neighbours against each other. So queries and keys are put in another order when they are loaded, the
same for both, which no product of the two notices: each half of a head is half of what turns, then half of what stays
still, at frequency 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.weights import Form, Reorder


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Brings the rows of a query or key projection (or its bias, or a norm's weight) into our order."""

    head_dim: int
    turning: int  # leading elements of a head that rope turns
    interleaved: bool = False  # the checkpoint turns 2i against 2i + 1, not i against i + turning / 2
    angle_scale: float = 1.0  # rope's; what stays still is not to be scaled, so that is undone here, at no cost
    num_heads: int | None = None  # leading heads of the tensor that are meant (queries and keys without values)

    @property
    def form(self) -> Form:
        """As what weights take it: one that only reorders says so."""
        return Reorder(self) if self.angle_scale == 1.0 else self

    def __call__(self, rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (-1, self.head_dim))  # [heads, head_dim, ...]
        stop = len(heads) if self.num_heads is None else self.num_heads
        order = head_order(self.head_dim, self.turning, self.interleaved)
        turned = heads[:stop][:, order.to(rows.device)]
        if self.angle_scale != 1.0:
            undo = torch.where(order < self.turning, 1.0, 1.0 / self.angle_scale).to(rows)
            turned = turned * undo.view(-1, *(1,) * (turned.dim() - 2))
        return torch.cat((turned, heads[stop:])).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class ByHead:
    """Brings the rows of a projection that has its heads' queries, keys and values in turn (or its bias) into queries,
    then keys, then values."""

    num_kv_heads: int
    head_dim: int
    order: HeadOrder | None  # of queries and keys, once they stand so

    @property
    def form(self) -> Form:
        return Reorder(self) if self.order is None or self.order.angle_scale == 1.0 else self

    def __call__(self, rows: Tensor) -> Tensor:
        # [kv_heads, its queries and two more, head_dim, ...]
        groups = rows.unflatten(0, (self.num_kv_heads, -1, self.head_dim))
        parts = groups.split_with_sizes((groups.shape[1] - 2, 1, 1), dim=1)
        merged = torch.cat([part.flatten(0, 2) for part in parts])
        return merged if self.order is None else self.order(merged)


def head_order(head_dim: int, turning: int, interleaved: bool = False) -> Tensor:
    """Which element of the checkpoint's head stands at each place of ours, [head_dim]."""
    elements = torch.arange(head_dim)
    turn, still = elements[:turning], elements[turning:].view(2, -1)
    turn = turn.view(-1, 2).t() if interleaved else turn.view(2, -1)
    return torch.cat((turn, still), dim=1).flatten()
