"""The token embedding and the output head: token ids to vectors, and hidden states to logits."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.weights import Weight


@runtime_checkable
class PacksTables(Protocol):
    """A scheme that stores the embedding in packed form."""

    def pack_table(self, weight: Weight) -> None: ...


class Embedding(nn.Module):
    """Looks up the vectors of token ids."""

    weight: Tensor  # or a list of one packed matrix, which dequantizes single rows

    def __init__(
        self,
        name: str,
        vocab_size: int,
        width: int,
        build: Build,
        scale: float = 1.0,
    ):
        super().__init__()
        weight = Weight.whole(f"{name}.weight", (vocab_size, width), build.dtype)
        self.weight = weight
        self.scale = torch.tensor(
            scale, dtype=build.dtype
        ).item()  # rounded to the model's dtype, as the reference does
        scheme = build.schemes.of(f"{name}.weight")
        if isinstance(scheme, PacksTables):
            scheme.pack_table(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        weight: Any = self.weight
        vectors = weight[0].rows(tokens) if isinstance(weight, list) else functional.embedding(tokens, weight)
        return vectors if self.scale == 1.0 else vectors * self.scale


class Head(nn.Module):
    """Computes logits. A tied head names the embedding's tensor, which the loader then shares between the two."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        width: int,
        build: Build,
        *,
        bias: bool = False,
        scale: float = 1.0,
        softcap: float | None = None,
    ):
        super().__init__()
        self.linear = Linear(width, [(name, vocab_size)], bias=bias, build=build)
        self.scale = scale
        self.softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.linear(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap
