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

    def __init__(self, name: str, vocab_size: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.weight = Weight.whole(f"{name}.weight", (vocab_size, width), dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)


class Head(nn.Module):
    """Logits. A tied head names the embedding's tensor, which the loader then shares between them."""

    def __init__(self, name: str, vocab_size: int, width: int, dtype: torch.dtype, scheme: Scheme):
        super().__init__()
        self.linear = Linear(width, [(name, vocab_size)], dtype=dtype, scheme=scheme)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)
