"""The gated feed-forward block of dense models: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels.table import Ops
from quire.layers.linear import Linear
from quire.layers.quant.scheme import Scheme


class GatedMLP(nn.Module):
    def __init__(self, prefix: str, width: int, inner_width: int, *, bias: bool, dtype: torch.dtype, ops: Ops,
                 scheme: Scheme):  # fmt: skip
        super().__init__()
        gate_up = [(f"{prefix}.gate_proj", inner_width), (f"{prefix}.up_proj", inner_width)]
        self.gate_up = Linear(width, gate_up, bias=bias, dtype=dtype, scheme=scheme)
        self.down = Linear(inner_width, [(f"{prefix}.down_proj", width)], bias=bias, dtype=dtype, scheme=scheme)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x)))
