"""The scheme of plain float weights, in the dtype of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.activations import Curve
from quire.kernels.table import Ops
from quire.layers.quant.scheme import apply_epilogue, apply_norm
from quire.layers.weights import Weight, with_zero_rows

if TYPE_CHECKING:
    from quire.layers.linear import Linear
    from quire.layers.norm import RMSNorm


class Dense:
    """Stores weights unquantized; fuses norm, gate and residual addition where `fused_linear` is faster."""

    def __init__(self, ops: Ops):
        self.ops = ops

    def create(self, linear: Linear, sources: list[tuple[str, int]], has_bias: bool, dtype: torch.dtype) -> None:
        weights = [(f"{prefix}.weight", rows) for prefix, rows in sources]
        biases = [(f"{prefix}.bias", rows) for prefix, rows in sources]
        linear.weight = Weight.stacked(weights, (linear.in_features,), dtype)
        linear.bias = Weight.stacked(biases, (), dtype) if has_bias else None

    def finish(self, linear: Linear) -> None:
        linear.whole = with_zero_rows(linear.weight)

    def apply(
        self, linear: Linear, x: Tensor, norm: RMSNorm | None, gate: Curve | None, residual: Tensor | None
    ) -> Tensor:
        fused = self.ops.fused_linear
        if fused is not None and fused.wins(len(x), linear.weight, gate):
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return fused.run(x, linear.weight, linear.bias, weight, eps, gate, residual)
        x = apply_norm(self.ops, x, norm)
        if residual is not None and linear.bias is None and gate is None:
            return residual.addmm_(x, linear.weight.t())  # the product adds in place, so the sum is free
        return apply_epilogue(self.ops, _product(linear, x), gate, residual)


def _product(linear: Linear, x: Tensor) -> Tensor:
    if linear.whole is None:
        return functional.linear(x, linear.weight, linear.bias)
    out = functional.linear(x, linear.whole)[:, : linear.out_features].contiguous()
    return out if linear.bias is None else out.add_(linear.bias)
