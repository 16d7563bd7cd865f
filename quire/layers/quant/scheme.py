"""The seam between a linear layer and the form its weight is kept in: `Linear` calls it, each scheme is a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.layers.linear import Linear


class Scheme(Protocol):
    """Stateless: what a scheme keeps, it keeps on the linear."""

    def create(self, linear: Linear, sources: list[tuple[str, int]], has_bias: bool, dtype: torch.dtype) -> None:
        """Register the weights this scheme wants from the checkpoint, on meta. `sources`: (prefix, rows) in order."""

    def finish(self, linear: Linear) -> None:
        """Called once the weights are real: repack them, drop what is no longer needed."""

    def apply(self, linear: Linear, x: Tensor) -> Tensor:
        """x [tokens, in_features] -> [tokens, out_features]"""
