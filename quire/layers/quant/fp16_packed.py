"""The scheme of float16 weights on CPUs, packed for torch's fbgemm: half the bytes to read, at nearly full accuracy.

The loader selects it for `--dtype float16` on a CPU. Activations stay float32 (plain float16 products are many times
slower there), so the only loss is the rounding of weights to 11 significant bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.activations import Curve
from quire.kernels.table import Ops
from quire.layers.quant.dense import Dense
from quire.layers.quant.scheme import apply_epilogue, apply_norm
from quire.layers.weights import own_weights

if TYPE_CHECKING:
    from quire.layers.linear import Linear
    from quire.layers.norm import RMSNorm


class Fp16Packed:
    """Stores weights in fbgemm's packed float16 layout; fuses nothing."""

    def __init__(self, ops: Ops):
        self.ops = ops

    def create(self, linear: Linear, sources: list[tuple[str, int]], has_bias: bool, dtype: torch.dtype) -> None:
        Dense(self.ops).create(linear, sources, has_bias, dtype)
        for _, weight in own_weights(linear):
            weight.stored = torch.float16 if weight.dim() > 1 else dtype

    def finish(self, linear: Linear) -> None:
        linear.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight, linear.bias)
        del linear.weight, linear.bias

    def apply(
        self, linear: Linear, x: Tensor, norm: RMSNorm | None, gate: Curve | None, residual: Tensor | None
    ) -> Tensor:
        out = torch.ops.quantized.linear_dynamic_fp16(apply_norm(self.ops, x, norm), linear.packed)
        return apply_epilogue(self.ops, out, gate, residual)

    @staticmethod
    def is_supported() -> bool:
        return "fbgemm" in torch.backends.quantized.supported_engines
