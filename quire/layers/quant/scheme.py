"""The seam between a linear layer and the form its weight is kept in: `Linear` calls it, each scheme is a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quire.kernels.table import Ops

if TYPE_CHECKING:
    from quire.layers.linear import Linear
    from quire.layers.norm import RMSNorm


class Scheme(Protocol):
    """What a scheme keeps of a weight, it keeps on the linear."""

    def create(self, linear: Linear, sources: list[tuple[str, int]], has_bias: bool, dtype: torch.dtype) -> None:
        """Register the weights this scheme wants from the checkpoint, on meta. `sources`: (prefix, rows) in order."""

    def finish(self, linear: Linear) -> None:
        """Called once the weights are real: repack them, drop what is no longer needed."""

    def apply(self, linear: Linear, x: Tensor, norm: RMSNorm | None, silu_mul: bool, residual: Tensor | None) -> Tensor:
        """As `Linear.forward`."""


def normed(ops: Ops, x: Tensor, norm: RMSNorm | None) -> Tensor:
    """What stands before a product, for schemes that do not fuse it."""
    return x if norm is None else ops.rms_norm(x, norm.weight, norm.eps)


def finished(ops: Ops, out: Tensor, silu_mul: bool, residual: Tensor | None) -> Tensor:
    """What comes after a product, for schemes that do not fuse it."""
    if silu_mul:
        out = ops.silu_mul(out)
    return out if residual is None else out.add_(residual)
