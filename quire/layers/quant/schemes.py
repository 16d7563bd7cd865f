"""Which scheme each tensor of a model has: one for all, or another for those whose names match a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quire.layers.quant.scheme import Scheme
from quire.types import QuireError


@dataclass(frozen=True, slots=True)
class Schemes:
    """Selects the scheme of a tensor by its checkpoint name."""

    usual: Scheme
    exceptions: tuple[tuple[str, Scheme], ...] = ()  # (pattern that matches whole tensor names, scheme); first wins

    def of(self, tensor_name: str) -> Scheme:
        """Returns the scheme of a tensor by its full name, `model.layers.0.mlp.down_proj.weight` for example."""
        return next((scheme for pattern, scheme in self.exceptions if re.fullmatch(pattern, tensor_name)), self.usual)

    def of_all(self, tensor_names: Iterable[str]) -> Scheme:
        """Returns the scheme of tensors that are merged into one weight. Raises `invalid_parameter` if they differ."""
        if not self.exceptions:
            return self.usual
        names = list(tensor_names)
        schemes = [self.of(name) for name in names]
        odd = next((name for name, scheme in zip(names, schemes, strict=True) if scheme is not schemes[0]), None)
        if odd is not None:
            what = f"{names[0]} and {odd} are one weight here, but are to be stored in different ways."
            raise QuireError("invalid_parameter", what, "Choose the same way for both.")
        return schemes[0]

    @property
    def kinds(self) -> tuple[Scheme, ...]:
        """All schemes that a tensor may have."""
        return self.usual, *(scheme for _, scheme in self.exceptions)
