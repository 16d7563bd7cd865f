"""The scheme of FP8 (e4m3) weights on CUDA, quantized while loading: one scale per output channel, half of bfloat16.

A product of one token keeps its activations in the model's dtype. With more, activations are quantized to FP8 with
a scale per token, which makes tensor cores twice as fast. Norms, embeddings and the residual stream stay in the model's
dtype. Both dimensions of a weight are padded to what tensor cores require; a padded weight has no single-token kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.activations import Curve
from quire.kernels.expert_types import quantize_matrix
from quire.kernels.table import Ops
from quire.layers.quant.dense import Dense
from quire.layers.quant.scheme import Activation, Scaled
from quire.layers.weights import own_weights

if TYPE_CHECKING:
    from quire.layers.linear import Linear
    from quire.layers.norm import RMSNorm


class Fp8:
    """Stores weights in FP8 with per-row scales; fuses norm, gate and residual addition."""

    expert_dtype = torch.float8_e4m3fn

    def __init__(self, ops: Ops):
        from quire.kernels.triton.linear import fp8, skinny

        self.ops = ops
        self._fp8, self._skinny = fp8, skinny

    def create(self, linear: Linear, sources: list[tuple[str, int]], has_bias: bool, dtype: torch.dtype) -> None:
        Dense(self.ops).create(linear, sources, has_bias, dtype)
        for name, weight in own_weights(linear):
            if name == "weight":
                weight.store_scaled(torch.float8_e4m3fn)

    def scale_rows(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Quantizes expert weights with power-of-two scales, which keep experts published in fewer bits exact."""
        return quantize_matrix(matrix)

    def finish(self, linear: Linear) -> None:
        padded = functional.pad(linear.weight.data, (0, 0, 0, -len(linear.weight) % self._fp8.MULTIPLE))
        weight, scale = self._fp8.quantize_rows(padded)
        linear.register_buffer("weight_scale", scale)  # [out_features, padded] float32
        del linear.weight
        linear.register_buffer("weight", weight)  # [out_features, in_features], both padded

    def apply(
        self, linear: Linear, x: Activation, norm: RMSNorm | None, gate: Curve | None, residual: Tensor | None
    ) -> Activation:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        if linear.weight.shape != (linear.out_features, linear.in_features):
            return self._apply_padded(linear, x, weight, eps, gate, residual)
        if not isinstance(x, Scaled):
            if len(x) == 1:
                return self._skinny.skinny_linear(
                    x,
                    linear.weight,
                    linear.bias,
                    norm_weight=weight,
                    eps=eps,
                    gate=gate,
                    residual=residual,
                    weight_scale=linear.weight_scale,
                )
            x = Scaled(*self._fp8.quantize_rows(x, norm_weight=weight, eps=eps), x.dtype)
        out = self._fp8.scaled_product(x.values, x.scale, linear.weight, linear.weight_scale, linear.bias, x.dtype)
        if gate is not None:
            return Scaled(*self._fp8.quantize_rows(out, gate=gate), x.dtype)
        return out if residual is None else residual.add_(out)

    def _apply_padded(
        self,
        linear: Linear,
        x: Activation,
        norm_weight: Tensor | None,
        eps: float,
        gate: Curve | None,
        residual: Tensor | None,
    ) -> Tensor:
        """Applies a padded weight (an odd vocabulary, for example), without fusing what follows the product."""
        if not isinstance(x, Scaled):
            x = Scaled(*self._fp8.quantize_rows(x, norm_weight=norm_weight, eps=eps), x.dtype)
        out = self._fp8.scaled_product(x.values, x.scale, linear.weight, linear.weight_scale, None, x.dtype)
        out = out[:, : linear.out_features].contiguous()
        if linear.bias is not None:
            out += linear.bias
        if gate is not None:
            out = self.ops.gate_mul(out, gate)
        return out if residual is None else residual.add_(out)
