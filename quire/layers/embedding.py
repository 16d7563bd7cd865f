"""Both ends of a model: token ids to vectors, and vectors to logits over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.layers.linear import Linear
from quire.layers.quant.scheme import Scheme
from quire.layers.weights import Weight


class Embedding(nn.Module):
    weight: Tensor

    def __init__(self, name: str, vocab_size: int, width: int, dtype: torch.dtype, scale: float = 1.0):
        super().__init__()
        self.weight = Weight.whole(f"{name}.weight", (vocab_size, width), dtype)
        self.scale = torch.tensor(scale, dtype=dtype).item()  # families that scale do it in the type they compute in

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = functional.embedding(tokens, self.weight)
        return vectors if self.scale == 1.0 else vectors * self.scale


class Head(nn.Module):
    """Logits. A tied head names the embedding's tensor, which the loader then shares between them."""

    def __init__(self, name: str, vocab_size: int, width: int, dtype: torch.dtype, scheme: Scheme, *,
                 bias: bool = False, scale: float = 1.0, softcap: float | None = None):  # fmt: skip
        super().__init__()
        self.linear = Linear(width, [(name, vocab_size)], bias=bias, dtype=dtype, scheme=scheme)
        self.scale = scale
        self.softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.linear(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap
