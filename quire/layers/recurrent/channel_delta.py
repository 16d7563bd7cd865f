"""Kimi Delta Attention (Kimi Linear): a gated delta net with a decay per channel of the key.

Projection, low-rank projections of decays and output gate, convolution, delta rule, norm with a sigmoid gate, output
projection. Everything between the projections is one op, as in the other recurrent layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels.recurrent_types import DeltaWeights, RecurrentShape
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.state import RecurrentLayersPlan
from quire.layers.recurrent.weights import conv_taps_apart
from quire.layers.weights import Part, Weight


class ChannelDeltaNet(nn.Module):
    """One Kimi Delta Attention block."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    gated_norm: Tensor

    def __init__(
        self,
        prefix: str,
        norm: RMSNorm,
        width: int,
        shape: RecurrentShape,
        cache_index: int,
        build: Build,
    ):
        super().__init__()
        self.norm = norm
        self.shape = shape
        self.cache_index = cache_index
        self.ops = build.ops
        self.rank = shape.key_dim
        heads, keys, values = shape.num_heads, shape.keys, shape.values
        rows = {"q": keys, "k": keys, "v": values, "b": heads, "f_a": self.rank, "g_a": self.rank}
        sources = [(f"{prefix}.{name}_proj", count) for name, count in rows.items()]
        self.project = Linear(width, sources, build=build)
        self.forget = Linear(self.rank, [(f"{prefix}.f_b_proj", keys)], build=build)
        self.gate = Linear(self.rank, [(f"{prefix}.g_b_proj", values)], build=build)
        self.conv = conv_taps_apart(prefix, (keys, keys, values), shape.conv_len, build.dtype)
        decay = Part(f"{prefix}.A_log", (1, 1, heads, 1), 0, heads, form=torch.flatten)
        self.a_log = Weight((heads,), torch.float32, (decay,))
        self.dt_bias = Weight.whole(f"{prefix}.dt_bias", (keys,), torch.float32)
        self.gated_norm = Weight.whole(f"{prefix}.o_norm.weight", (shape.value_dim,), build.dtype)
        self.out = Linear(values, [(f"{prefix}.o_proj", width)], build=build)

    def forward(self, stream: Tensor, plan: RecurrentLayersPlan) -> Tensor:
        """Returns the residual stream plus this layer's output. stream [tokens, width]"""
        shape, rank = self.shape, self.rank
        x = self.project(stream, norm=self.norm)
        mixed, low_forget, low_gate = x.split_with_sizes((shape.channels + shape.num_heads, rank, rank), 1)
        forget, gate = self.forget(low_forget.contiguous()), self.gate(low_gate.contiguous())
        weights = DeltaWeights(self.conv, self.a_log, self.dt_bias, self.gated_norm, self.norm.eps)
        state = plan.states[self.cache_index]
        out = self.ops.channel_delta_net(mixed, forget, gate, weights, shape, state, plan.kernel)
        return self.out(out, residual=stream)


def channel_activations(shape: RecurrentShape) -> int:
    """Returns the elements of activations alive at one time, per token: those of every delta net, the decays in the
    model's dtype and as cumulative sums in float32, and the decayed keys.
    """
    return shape.activation_elements + 6 * shape.keys
