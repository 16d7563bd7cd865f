"""The token embedding and the output head: token ids to vectors, and hidden states to logits."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.layers.adapters import LinearAdapters
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.weights import Share, Weight


@runtime_checkable
class PacksTables(Protocol):
    """A scheme that stores the embedding in packed form."""

    def pack_table(self, weight: Weight) -> None: ...


class Embedding(nn.Module):
    """Looks up the vectors of token ids."""

    weight: Tensor  # or a list of one packed matrix, which dequantizes single rows
    first: int  # the first token of this rank
    count: int  # number of tokens of this rank
    adapters: LinearAdapters | None = None  # set once the engine has an adapter for this weight

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
        self.communicator, self.first, self.count = build.communicator, 0, vocab_size
        if build.communicator.size > 1:
            first, stop = build.vocabulary(vocab_size)[build.communicator.rank]
            self.first, self.count = first, stop - first
            weight = weight.cut(Share(((first, stop),)))
        self.weight = weight
        self.scale = torch.tensor(
            scale, dtype=build.dtype
        ).item()  # rounded to the model's dtype, as the reference does
        scheme = build.schemes.of(f"{name}.weight")
        if isinstance(scheme, PacksTables):
            scheme.pack_table(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.communicator.size == 1:
            vectors = self._look_up(tokens)
            if self.adapters is not None and self.adapters.is_used:
                vectors = self.adapters.look_up(vectors, tokens)
        else:  # a token's vector is on one rank; the others add zeros
            here = (tokens >= self.first) & (tokens < self.first + self.count)
            vectors = self._look_up(torch.where(here, tokens - self.first, 0)) * here.unsqueeze(1)
            vectors = self.communicator.all_reduce(vectors)
        return vectors if self.scale == 1.0 else vectors * self.scale

    def _look_up(self, tokens: Tensor) -> Tensor:
        """Returns the vectors of tokens of this rank. tokens [n]: rows of `weight` -> [n, width]"""
        weight: Any = self.weight
        return weight[0].rows(tokens) if isinstance(weight, list) else functional.embedding(tokens, weight)


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
        self.communicator = build.communicator
        self.sizes: tuple[int, ...] = (vocab_size,)  # tokens of each rank
        split = None
        if build.communicator.size > 1:
            spans = build.vocabulary(vocab_size)
            self.sizes = tuple(stop - start for start, stop in spans)
            split = build.split_outputs([(vocab_size, spans[build.communicator.rank])])
        self.linear = Linear(width, [(name, vocab_size)], bias=bias, build=build, split=split)
        self.scale = scale
        self.softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.linear(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        logits = logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap
        return self.communicator.all_gather(logits, self.sizes)
