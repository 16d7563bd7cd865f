"""Mamba2 (Nemotron-H and others): projection, convolution, recurrence, skip, gated norm, output projection.

Everything between the two projections is one op, as in the gated delta net.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.recurrent_types import MambaWeights, RecurrentShape
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.state import RecurrentLayersPlan
from quire.layers.recurrent.weights import conv_taps, log_decay
from quire.layers.weights import Weight


@dataclass(frozen=True, slots=True)
class MambaOptions:
    """The settings in which families differ."""

    eps: float
    norm_groups: int  # groups of channels that the output norm treats separately
    conv_bias: bool = True
    bias: bool = False  # of both projections, except for `out_bias`
    dt_limits: tuple[float, float] = (0.0, float("inf"))  # bounds of the time step
    norm: bool = True  # norm of the output
    gate_first: bool = True  # the gate comes before the norm
    out_bias: bool | None = None  # of the output projection; None: as `bias`


class Mamba2(nn.Module):
    """One Mamba2 block."""

    conv: Tensor
    conv_bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    skip: Tensor
    gated_norm: Tensor | None

    def __init__(
        self,
        prefix: str,
        norm: RMSNorm,
        width: int,
        shape: RecurrentShape,
        cache_index: int,
        options: MambaOptions,
        build: Build,
    ):
        super().__init__()
        self.norm = norm
        self.shape = shape
        self.cache_index = cache_index
        self.options = options
        self.ops = build.ops
        heads, channels = shape.num_heads, shape.channels
        rows = shape.values + channels + heads
        self.project = Linear(width, [(f"{prefix}.in_proj", rows)], bias=options.bias, build=build)
        self.conv = conv_taps(f"{prefix}.conv1d", channels, shape.conv_len, build.dtype)
        self.conv_bias = Weight.whole(f"{prefix}.conv1d.bias", (channels,), build.dtype) if options.conv_bias else None
        self.a_log = log_decay(f"{prefix}.A", heads)
        self.dt_bias = Weight.whole(f"{prefix}.dt_bias", (heads,), torch.float32)
        self.skip = Weight.whole(f"{prefix}.D", (heads,), torch.float32)
        self.gated_norm = Weight.whole(f"{prefix}.norm.weight", (shape.values,), build.dtype) if options.norm else None
        out_bias = options.bias if options.out_bias is None else options.out_bias
        self.out = Linear(shape.values, [(f"{prefix}.out_proj", width)], bias=out_bias, build=build)

    def forward(self, stream: Tensor, plan: RecurrentLayersPlan) -> Tensor:
        """Returns the residual stream plus this layer's output. stream [tokens, width]"""
        x = self.project(stream, norm=self.norm)
        options = self.options
        weights = MambaWeights(
            self.conv,
            self.conv_bias,
            self.a_log,
            self.dt_bias,
            self.skip,
            self.gated_norm,
            options.eps,
            options.norm_groups,
            *options.dt_limits,
            options.gate_first,
        )
        out = self.ops.mamba2(x, weights, self.shape, plan.states[self.cache_index], plan.kernel)
        return self.out(out, residual=stream)
