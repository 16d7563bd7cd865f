"""Plain float weights: what a checkpoint holds, in the type the model computes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from quire.layers.weights import Weight

if TYPE_CHECKING:
    from quire.layers.linear import Linear


class Dense:
    def create(self, linear: Linear, sources: list[tuple[str, int]], has_bias: bool, dtype: torch.dtype) -> None:
        weights = [(f"{prefix}.weight", rows) for prefix, rows in sources]
        biases = [(f"{prefix}.bias", rows) for prefix, rows in sources]
        linear.weight = Weight.stacked(weights, (linear.in_features,), dtype)
        linear.bias = Weight.stacked(biases, (), dtype) if has_bias else None

    def finish(self, linear: Linear) -> None:
        pass

    def apply(self, linear: Linear, x: Tensor) -> Tensor:
        return functional.linear(x, linear.weight, linear.bias)
