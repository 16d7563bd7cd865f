"""The `Scheme` protocol: how a linear layer's weight is stored and applied. Each implementation is a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quire.kernels.activations import Curve
from quire.kernels.table import Ops

if TYPE_CHECKING:
    from quire.layers.linear import Linear
    from quire.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Scaled:
    """An activation in FP8 with per-row scales, passed from one product to the next of the same scheme."""

    values: Tensor  # [rows, width] float8_e4m3fn
    scale: Tensor  # [rows] float32
    dtype: torch.dtype  # dtype before quantization


Activation = Tensor | Scaled


class Scheme(Protocol):
    """Stores and applies the weight of a `Linear`. All of its state for a weight is on that module."""

    def create(self, linear: Linear, sources: list[tuple[str, int]], has_bias: bool, dtype: torch.dtype) -> None:
        """Registers the weights to load, on the meta device. `sources`: (checkpoint prefix, rows) in order."""

    def finish(self, linear: Linear) -> None:
        """Repacks the loaded weights and drops the originals. Called once per linear."""

    def apply(self, linear: Linear, x: Any, norm: RMSNorm | None, gate: Curve | None, residual: Tensor | None) -> Any:
        """Computes `Linear.forward`. With a gate the result may be a `Scaled`, since only a product follows it."""


def apply_norm(ops: Ops, x: Tensor, norm: RMSNorm | None) -> Tensor:
    """Applies the norm before a product, for schemes that do not fuse it."""
    return x if norm is None else ops.rms_norm(x, norm.weight, norm.eps)


def apply_epilogue(ops: Ops, out: Tensor, gate: Curve | None, residual: Tensor | None) -> Tensor:
    """Applies the gate and the residual addition after a product, for schemes that do not fuse them."""
    if gate is not None:
        out = ops.gate_mul(out, gate)
    return out if residual is None else out.add_(residual)
