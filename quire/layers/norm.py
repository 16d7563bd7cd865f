"""RMS norm of the residual stream, and the weights of the norm of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels.table import Ops
from quire.layers.weights import Weight


class RMSNorm(nn.Module):
    weight: Tensor

    def __init__(self, name: str, width: int, eps: float, dtype: torch.dtype, ops: Ops):
        super().__init__()
        self.weight = Weight.whole(f"{name}.weight", (width,), dtype)
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class QKNorm(nn.Module):
    """The weights that norm each query head and each key head; applied where rope is, in one kernel."""

    q_weight: Tensor
    k_weight: Tensor

    def __init__(self, prefix: str, head_dim: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.q_weight = Weight.whole(f"{prefix}.q_norm.weight", (head_dim,), dtype)
        self.k_weight = Weight.whole(f"{prefix}.k_norm.weight", (head_dim,), dtype)
        self.eps = eps
