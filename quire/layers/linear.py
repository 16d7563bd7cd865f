"""A linear layer over one or several checkpoint matrices. Attention, MLP and head are built of it.

Matrices with the same input are merged into one weight, so that they cost one product: queries, keys and values; gate
and up. How the weight is stored and applied is the scheme's business.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.quant.scheme import Scheme


class Linear(nn.Module):
    """Which of the attributes below exist is up to the scheme."""

    weight: Tensor
    bias: Tensor | None
    packed: Any  # a weight in a form only its own op understands

    def __init__(self, in_features: int, sources: list[tuple[str, int]], *, bias: bool = False, dtype: torch.dtype,
                 scheme: Scheme):  # fmt: skip
        """`sources`: (checkpoint prefix, rows) of each merged matrix, in the order their outputs stand."""
        super().__init__()
        self.in_features = in_features
        self.out_features = sum(rows for _, rows in sources)
        self.scheme = scheme
        scheme.create(self, sources, bias, dtype)

    def finish(self) -> None:
        """The loader calls this once the weights are real."""
        self.scheme.finish(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.scheme.apply(self, x)
