"""The seam between a linear layer and the form its weight is kept in: `Linear` calls it, each scheme is a file."""

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
    """An activation in FP8, as one product hands it to the next of the same scheme."""

    values: Tensor  # [rows, width] float8_e4m3fn
    scale: Tensor  # [rows] float32
    dtype: torch.dtype  # what it stands for


Activation = Tensor | Scaled


class Scheme(Protocol):
    """What a scheme keeps of a weight, it keeps on the linear."""

    def create(self, linear: Linear, sources: list[tuple[str, int]], has_bias: bool, dtype: torch.dtype) -> None:
        """Register the weights this scheme wants from the checkpoint, on meta. `sources`: (prefix, rows) in order."""

    def finish(self, linear: Linear) -> None:
        """Called once the weights are real: repack them, drop what is no longer needed."""

    def apply(self, linear: Linear, x: Any, norm: RMSNorm | None, gate: Curve | None, residual: Tensor | None) -> Any:
        """As `Linear.forward`. Behind a gate comes another product, so what it gives may be in a form of one's own."""


def normed(ops: Ops, x: Tensor, norm: RMSNorm | None) -> Tensor:
    """What stands before a product, for schemes that do not fuse it."""
    return x if norm is None else ops.rms_norm(x, norm.weight, norm.eps)


def finished(ops: Ops, out: Tensor, gate: Curve | None, residual: Tensor | None) -> Tensor:
    """What comes after a product, for schemes that do not fuse it."""
    if gate is not None:
        out = ops.gate_mul(out, gate)
    return out if residual is None else out.add_(residual)
