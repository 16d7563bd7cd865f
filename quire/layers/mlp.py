"""The gated feed-forward block of dense models: stream + down(silu(gate(norm(stream))) * up(norm(stream)))."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.quant.scheme import Scheme


class GatedMLP(nn.Module):
    def __init__(self, prefix: str, norm: RMSNorm, width: int, inner_width: int, *, bias: bool, dtype: torch.dtype,
                 scheme: Scheme):  # fmt: skip
        super().__init__()
        gate_up = [(f"{prefix}.gate_proj", inner_width), (f"{prefix}.up_proj", inner_width)]
        self.norm = norm
        self.gate_up = Linear(width, gate_up, bias=bias, dtype=dtype, scheme=scheme)
        self.down = Linear(inner_width, [(f"{prefix}.down_proj", width)], bias=bias, dtype=dtype, scheme=scheme)

    def forward(self, stream: Tensor) -> Tensor:
        """stream [tokens, width] -> the stream with this block's share added"""
        return self.down(self.gate_up(stream, norm=self.norm, silu_mul=True), residual=stream)
