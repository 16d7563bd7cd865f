"""A linear layer over one or several checkpoint matrices. Attention, MLP and head are built of it.

Matrices with the same input are merged into one weight, so that they cost one product: queries, keys and values; gate
and up. How the weight is stored and applied is the scheme's business, and so is what it fuses: a product is asked for
together with the norm before it and the gate or the addition to the residual stream after it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels.activations import Curve
from quire.layers.norm import RMSNorm
from quire.layers.quant.scheme import Activation, Scheme


class Linear(nn.Module):
    weight: Tensor
    bias: Tensor | None
    whole: Tensor | None = None  # the weight and rows of zeros behind it, where a product with those is much quicker
    weight_scale: Tensor  # [out_features], of schemes that have one

    def __init__(
        self,
        in_features: int,
        sources: list[tuple[str, int]],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        scheme: Scheme,
    ):
        """`sources`: (checkpoint prefix, rows) of each merged matrix, in the order their outputs stand."""
        super().__init__()
        self.in_features = in_features
        self.out_features = sum(rows for _, rows in sources)
        self.scheme = scheme
        scheme.create(self, sources, bias, dtype)

    def finish(self) -> None:
        """The loader calls this once the weights are real."""
        self.scheme.finish(self)

    def forward(
        self, x: Activation, *, norm: RMSNorm | None = None, gate: Curve | None = None, residual: Tensor | None = None
    ) -> Activation:
        """x [tokens, in_features] -> [tokens, out_features], or half of that with `gate`. In order: the norm of x,
        the product, gate(first half) * second half, the sum with `residual`, whose memory may be taken for it. What a
        `gate` gives is for another linear of the same scheme; all else is a tensor."""
        return self.scheme.apply(self, x, norm, gate, residual)
