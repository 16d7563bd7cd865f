"""The `Checkpoint` protocol: named tensors in files. Folders, GGUF files and views of either implement it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.layers.weights import PartSource


class Checkpoint(Protocol):
    """Named tensors in files, under Hugging Face names."""

    where: str  # for error messages
    shapes: dict[str, tuple[int, ...]]  # by Hugging Face name

    def read(self, name: str, target: Tensor, index: int | None = None) -> None:
        """Copies a tensor, or entry `index` of it, into `target`, which has its shape; dtype and device may differ."""

    def source(self, name: str, index: int | None = None) -> PartSource:
        """Returns access to a tensor's rows, or to those of entry `index` of it, for weights that are packed."""
