"""Draft networks: small networks that run beside a model and propose its next tokens.

`startup` loads one and `runtime.proposals` runs it. A draft network sees every token that the model computes, so its
cache is a group beside the model's, with the same pages, prefix hits and swaps. What it proposes is only verified, so
nothing in its cache can change a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from quire.layers.step import Step
from quire.models.model import Model
from quire.types import CacheSpec, QuireError


class DraftNetwork(Protocol):
    """A network that proposes tokens. The names of its cache groups differ from the model's."""

    specs: list[CacheSpec]
    vocab_size: int
    activation_elements: int  # see `Model`
    # Whether it reads the model's hidden states. If so, its entry at a position is made from the model's hidden state
    # there and the token after it; if not, from the token at that position.
    takes_hidden: bool

    def forward(self, step: Step, hidden: Tensor | None, caches: Mapping[str, Tensor]) -> Tensor:
        """Computes the step's entries and leaves its state in `caches`; returns the hidden states `step.wanted`, [n,
        width]. hidden [tokens, width]: of the model, or of this network for entries that follow its own drafts."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden [n, width] to logits [n, vocab]."""
        ...


class DraftModel:
    """Implements `DraftNetwork` with another model that has the same tokenizer."""

    takes_hidden = False

    def __init__(self, model: Model, name: str):
        """`name`: of the model, for errors."""
        state = next((spec for spec in model.specs if spec.kind == "state"), None)
        if state is not None:
            what = f"{name} keeps a recurrent state, which can't be rolled back after each draft."
            raise QuireError("unsupported_draft", what, "Choose a draft model whose layers all attend.", "speculate")
        self._model = model
        self._names = {f"draft {spec.group}": spec.group for spec in model.specs}
        self.specs = [replace(spec, group=f"draft {spec.group}") for spec in model.specs]
        self.vocab_size = model.vocab_size
        self.activation_elements = model.activation_elements

    def forward(self, step: Step, hidden: Tensor | None, caches: Mapping[str, Tensor]) -> Tensor:
        groups = {name: step.groups[group] for group, name in self._names.items()}
        own = {name: caches[group] for group, name in self._names.items()}
        return self._model.forward(replace(step, groups=groups), own)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def check_taps(model: Model, layers: Sequence[int], name: str) -> None:
    """Raises unless the model gives the hidden states of these layers. `name`: of what asks for them."""
    count = model.num_tapped_layers()
    if not count:
        what = f"{name} reads hidden states of layers, which this kind of model does not give."
        raise QuireError("unsupported_draft", what, "Choose other proposers.", "speculate")
    wrong = next((layer for layer in layers if not 0 <= layer < count), None)
    if wrong is not None:
        what = f"{name} reads the hidden states of layer {wrong}, the model has the layers 0 to {count - 1}."
        raise QuireError("unsupported_draft", what, "Use one that was made for this model.", "speculate")
