"""A gated delta net (Qwen3-Next, Qwen3.5): projection, convolution, delta rule, gated norm, output, on the stream.

What lies between the two projections is one op, so that a step of single tokens can be one kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.kernels.recurrent import DeltaWeights, RecurrentShape
from quire.kernels.table import Ops
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.quant.scheme import Scheme
from quire.layers.recurrent import RecurrentLayersPlan
from quire.layers.weights import Weight, set_forms


class GatedDeltaNet(nn.Module):
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    gated_norm: Tensor

    def __init__(self, prefix: str, norm: RMSNorm, width: int, shape: RecurrentShape, cache_index: int, *,
                 by_group: bool, dtype: torch.dtype, ops: Ops, scheme: Scheme):  # fmt: skip
        """`by_group`: the checkpoint keeps one tensor with all that belongs to a group of heads side by side
        (Qwen3-Next), not one tensor per purpose (Qwen3.5)."""
        super().__init__()
        self.norm = norm
        self.shape = shape
        self.cache_index = cache_index
        self.ops = ops
        heads = shape.num_heads
        if by_group:
            sources = [(f"{prefix}.in_proj_qkvz", shape.channels + shape.values), (f"{prefix}.in_proj_ba", 2 * heads)]
        else:
            sources = [(f"{prefix}.in_proj_qkv", shape.channels), (f"{prefix}.in_proj_z", shape.values),
                       (f"{prefix}.in_proj_b", heads), (f"{prefix}.in_proj_a", heads)]  # fmt: skip
        self.project = Linear(width, sources, dtype=dtype, scheme=scheme)
        if by_group:
            values, per_group = shape.values // shape.num_groups, heads // shape.num_groups
            qkvz = ungroup(shape.num_groups, (shape.key_dim, shape.key_dim, values, values))
            set_forms(self.project, (qkvz, ungroup(shape.num_groups, (per_group, per_group))))
        self.conv = Weight.whole(f"{prefix}.conv1d.weight", (shape.channels, 1, shape.conv_len), dtype)
        self.a_log = Weight.whole(f"{prefix}.A_log", (heads,), torch.float32)
        self.dt_bias = Weight.whole(f"{prefix}.dt_bias", (heads,), torch.float32)
        self.gated_norm = Weight.whole(f"{prefix}.norm.weight", (shape.value_dim,), dtype)
        self.out = Linear(shape.values, [(f"{prefix}.out_proj", width)], dtype=dtype, scheme=scheme)

    def forward(self, stream: Tensor, plan: RecurrentLayersPlan) -> Tensor:
        """stream [tokens, width] -> the stream with this layer's share added"""
        x = self.project(stream, norm=self.norm)
        weights = DeltaWeights(self.conv, self.a_log, self.dt_bias, self.gated_norm, self.norm.eps)
        out = self.ops.gated_delta_net(x, weights, self.shape, plan.states[self.cache_index], plan.kernel)
        return self.out(out, residual=stream)


def ungroup(num_groups: int, sizes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """For rows that lie group by group, each with blocks of these sizes: every block of all groups together instead."""

    def form(rows: Tensor) -> Tensor:
        blocks = rows.unflatten(0, (num_groups, sum(sizes))).split(sizes, dim=1)
        return torch.cat([block.flatten(0, 1) for block in blocks])

    return form
