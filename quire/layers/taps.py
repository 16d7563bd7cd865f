"""Taps: hidden states of named layers, for draft networks that read them.

A caller puts a `Taps` into the `Step` and reads it after the model's forward pass. A model that gives hidden states
calls `keep` before each layer; a step without taps costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Taps:
    """The residual stream that enters some layers of one forward pass, for every token of the step."""

    def __init__(self, layers: Sequence[int]):
        """`layers`: counted from 0, in the order in which `joined` has them."""
        self.layers = tuple(layers)
        self._found: dict[int, Tensor] = {}

    def keep(self, layer: int, stream: Tensor) -> None:
        """Keeps a copy of what enters a layer, [tokens, width], if it was asked for. Layers may work in place."""
        if layer in self.layers:
            self._found[layer] = stream.clone()

    def joined(self) -> Tensor:
        """Returns the hidden states of all layers beside each other, [tokens, layers * width]."""
        return torch.cat([self._found[layer] for layer in self.layers], dim=1)
