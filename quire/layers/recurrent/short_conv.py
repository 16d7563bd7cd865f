"""LFM2's short convolution: projection, convolution between two gates, output projection. Its state is its last inputs.

Everything between the two projections is one op, as in the other recurrent layers.
"""

from __future__ import annotations

from torch import Tensor, nn

from quire.kernels.recurrent_types import ConvShape, ConvWeights
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.state import RecurrentLayersPlan
from quire.layers.recurrent.weights import conv_taps
from quire.layers.weights import Weight


class ShortConv(nn.Module):
    """One short convolution block."""

    conv: Tensor
    conv_bias: Tensor | None

    def __init__(
        self,
        prefix: str,
        norm: RMSNorm,
        shape: ConvShape,
        cache_index: int,
        *,
        bias: bool,
        build: Build,
    ):
        """`bias`: whether the convolution and both projections have one."""
        super().__init__()
        self.norm = norm
        self.shape = shape
        self.cache_index = cache_index
        self.ops = build.ops
        width = shape.channels
        self.project = Linear(width, [(f"{prefix}.in_proj", 3 * width)], bias=bias, build=build)
        self.conv = conv_taps(f"{prefix}.conv", width, shape.conv_len, build.dtype)
        self.conv_bias = Weight.whole(f"{prefix}.conv.bias", (width,), build.dtype) if bias else None
        self.out = Linear(width, [(f"{prefix}.out_proj", width)], bias=bias, build=build)

    def forward(self, stream: Tensor, plan: RecurrentLayersPlan) -> Tensor:
        """Returns the residual stream plus this layer's output. stream [tokens, width]"""
        x = self.project(stream, norm=self.norm)
        weights = ConvWeights(self.conv, self.conv_bias)
        out = self.ops.short_conv(x, weights, self.shape, plan.states[self.cache_index], plan.kernel)
        return self.out(out, residual=stream)
