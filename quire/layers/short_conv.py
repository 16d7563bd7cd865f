"""LFM2's convolution: projection, convolution between two gates, output, on the stream. It keeps its last inputs.

What lies between the two projections is one op, as with the other recurrent layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.recurrent import ConvShape, ConvWeights
from quire.kernels.table import Ops
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.quant.scheme import Scheme
from quire.layers.recurrent import RecurrentLayersPlan
from quire.layers.weights import Part, Weight


class ShortConv(nn.Module):
    conv: Tensor
    conv_bias: Tensor | None

    def __init__(self, prefix: str, norm: RMSNorm, shape: ConvShape, cache_index: int, *, bias: bool,
                 dtype: torch.dtype, ops: Ops, scheme: Scheme):  # fmt: skip
        """`bias`: of the convolution and of both projections."""
        super().__init__()
        self.norm = norm
        self.shape = shape
        self.cache_index = cache_index
        self.ops = ops
        width = shape.channels
        self.project = Linear(width, [(f"{prefix}.in_proj", 3 * width)], bias=bias, dtype=dtype, scheme=scheme)
        self.conv = _taps(f"{prefix}.conv", shape, dtype)
        self.conv_bias = Weight.whole(f"{prefix}.conv.bias", (width,), dtype) if bias else None
        self.out = Linear(width, [(f"{prefix}.out_proj", width)], bias=bias, dtype=dtype, scheme=scheme)

    def forward(self, stream: Tensor, plan: RecurrentLayersPlan) -> Tensor:
        """stream [tokens, width] -> the stream with this layer's share added"""
        x = self.project(stream, norm=self.norm)
        weights = ConvWeights(self.conv, self.conv_bias)
        out = self.ops.short_conv(x, weights, self.shape, plan.states[self.cache_index], plan.kernel)
        return self.out(out, residual=stream)


def _taps(name: str, shape: ConvShape, dtype: torch.dtype) -> Weight:
    """As Hugging Face keeps them; or as GGUF files do, without the dimension of one."""
    width, taps = shape.channels, shape.conv_len
    weight = Weight.whole(f"{name}.weight", (width, 1, taps), dtype)
    weight.others = ((Part(f"{name}.taps.weight", (width, taps), 0, width, form=_Spread()),),)
    return weight


@dataclass(frozen=True, slots=True)
class _Spread:
    """A form: [channels, taps] with a dimension of one between them."""

    def __call__(self, taps: Tensor) -> Tensor:
        return taps.unsqueeze(1)
