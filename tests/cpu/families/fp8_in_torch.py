"""The FP8 scheme on a CPU: its CUDA kernels' twins in torch, with all bits kept, so that nothing may differ.

The harness loads every family with it and holds it to the bound of plain float32: whatever is off then is how layers
use the scheme, not how FP8 rounds. That the kernels round as FP8 does is tested where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.activations import Curve
from quire.kernels.reference import small_ops as reference
from quire.kernels.table import REFERENCE
from quire.layers.quant.fp8 import Fp8

STORED = torch.float64  # in place of float8_e4m3fn


class Kernels:
    MULTIPLE = 16

    @classmethod
    def quantize_rows(cls, x: Tensor, *, norm_weight: Tensor | None = None, eps: float = 0.0,
                      gate: Curve | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = x if norm_weight is None else reference.rms_norm(x, norm_weight, eps)
        x = x if gate is None else reference.gate_mul(x, gate)
        scale = x.abs().amax(1).clamp(min=1e-12) / 448.0
        x = functional.pad(x, (0, -x.shape[1] % cls.MULTIPLE))
        return x.to(STORED) / scale[:, None], scale

    @classmethod
    def scaled_product(cls, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
                       dtype: torch.dtype) -> Tensor:  # fmt: skip
        assert x.dtype == weight.dtype == STORED
        assert not any(size % cls.MULTIPLE for size in weight.shape), "what the matrix units refuse"
        product = functional.linear(x * x_scale[:, None], weight * weight_scale[:, None])
        return (product if bias is None else product + bias).to(dtype)

    @staticmethod
    def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm_weight: Tensor | None = None,
                      eps: float = 0.0, gate: Curve | None = None, residual: Tensor | None = None,
                      weight_scale: Tensor) -> Tensor:  # fmt: skip
        assert len(x) == 1 and weight.dtype == STORED
        x = x if norm_weight is None else reference.rms_norm(x, norm_weight, eps)
        out = functional.linear(x, (weight * weight_scale[:, None]).to(x.dtype), bias)
        out = out if gate is None else reference.gate_mul(out, gate)
        return out if residual is None else residual + out


class Fp8InTorch(Fp8):
    expert_dtype = STORED

    def __init__(self) -> None:
        self.ops = REFERENCE
        self._fp8 = self._skinny = Kernels  # type: ignore[assignment]

    def scale_rows(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        scale = matrix.abs().amax(1).clamp(min=1e-12) / 448.0
        return matrix.to(STORED) / scale[:, None], scale
