"""RMS norm, alone or fused with the residual addition before it; and the norm of queries and keys per head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels.table import Ops
from quire.layers.weights import Part, Weight


class RMSNorm(nn.Module):
    weight: Tensor

    def __init__(self, name: str, width: int, eps: float, dtype: torch.dtype, ops: Ops):
        super().__init__()
        self.weight = Weight.whole(f"{name}.weight", (width,), dtype)
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add `x` to the residual stream; return the normed stream and the stream. May reuse the memory of `x`."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class QKNorm(nn.Module):
    """Norms every query head with one weight and every key head with another, in one op over both."""

    weight: Tensor

    def __init__(self, prefix: str, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, dtype: torch.dtype,
                 ops: Ops):  # fmt: skip
        super().__init__()
        total = num_heads + num_kv_heads
        parts = (
            Part(f"{prefix}.q_norm.weight", (head_dim,), 0, num_heads),
            Part(f"{prefix}.k_norm.weight", (head_dim,), num_heads, total),
        )
        self.weight = Weight((total, head_dim), dtype, parts)
        self.eps = eps
        self.ops = ops

    def forward(self, qk: Tensor) -> Tensor:
        """qk [tokens, heads + kv_heads, head_dim], queries first."""
        return self.ops.rms_norm(qk, self.weight, self.eps)
