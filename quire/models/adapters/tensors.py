"""An adapter's tensors as its file has them, by module; each kind of file has a reader that fills them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Pair:
    """The two matrices of one module; of an embedding, a [rank, vocab] and b [width, rank]."""

    a: Tensor | None = None  # [rank, in_features]
    b: Tensor | None = None  # [rows, rank]
    is_embedding: bool = False


@dataclass(slots=True)
class LoraTensors:
    """All tensors of an adapter, under the names of the checkpoint."""

    pairs: dict[str, Pair] = field(default_factory=dict)
    saved: dict[str, Tensor] = field(default_factory=dict)  # weights of modules that are replaced
    scales: dict[str, float] = field(default_factory=dict)  # of pairs
