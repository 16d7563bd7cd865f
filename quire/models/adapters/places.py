"""The weights of a model that an adapter can change, by the names that adapters call them.

Taken from the model on meta: the loading rule of each weight says which checkpoint tensors fill which of its rows, and
in which order. An update of a checkpoint's matrix is brought to the weight's rows by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.layers.adapters import AdapterPool, LinearAdapters
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.weights import Form, Part, Weight
from quire.types import QuireError

_OTHER_SPELLINGS = (  # of module names, where a text model is a part of a larger one
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
)


@dataclass(frozen=True, slots=True)
class Place:
    """One checkpoint matrix in a weight."""

    number: int  # of the weight
    part: Part
    columns: int  # of the weight

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the checkpoint's matrix."""
        return self.part.stop - self.part.start, self.columns

    def bring(self, rows: Tensor, name: str) -> Tensor:
        """Returns rows of the checkpoint's matrix, [rows, n], in the order and scale of the weight."""
        form = self.part.form
        if form is None:
            return rows
        if not _acts_on_rows(form, len(rows)):
            what = f"The adapter changes {name}, whose checkpoint layout is transposed or cut while loading."
            raise QuireError("unsupported_adapter", what, "Merge the adapter into the weights.", "adapter")
        return form(rows)


class Places:
    """The places of a model, by checkpoint name without `.weight`."""

    def __init__(self, model: nn.Module):
        """`model`: on meta, before its weights are loaded."""
        self.modules: list[nn.Module] = []
        self.head_dim = next((m.shape.head_dim for m in model.modules() if isinstance(m, Attention)), None)
        self._linears: dict[str, Place] = {}
        self._embeddings: dict[str, Place] = {}
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, Linear | Embedding) and isinstance(weight, Weight):
                found = self._linears if isinstance(module, Linear) else self._embeddings
                for place in _places_of(len(self.modules), weight):
                    found.setdefault(place.part.name.removesuffix(".weight"), place)
                self.modules.append(module)
            if isinstance(module, Head) and isinstance(module.linear.weight, Weight):
                # a tied head has the embedding's name; adapters call it by its own
                place = next(iter(_places_of(len(self.modules), module.linear.weight)))
                self._linears.setdefault("lm_head", place)

    def linear(self, name: str) -> Place | None:
        """Returns the matrix of a linear layer that adapters call by this name; None: the model has none."""
        return _find(self._linears, name)

    def embedding(self, name: str) -> Place | None:
        return _find(self._embeddings, name)

    @property
    def is_empty(self) -> bool:
        """Whether the model has no weight that adapters can change."""
        return not self._linears

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Returns rows and columns of every linear layer but the head, by name."""
        tied = self._embeddings.keys() | {"lm_head"}
        return {name: place.shape for name, place in self._linears.items() if name not in tied}

    def release(self) -> None:
        """Lets go of the model, so that its memory can be freed. Names and shapes stay."""
        self.modules = []

    def attach(self, pool: AdapterPool) -> None:
        """Connects every weight to the adapters of this pool."""
        for number, module in enumerate(self.modules):
            module.adapters = LinearAdapters(pool, number)  # type: ignore[assignment]


def _find(places: dict[str, Place], name: str) -> Place | None:
    for spelled, ours in (("", ""), *_OTHER_SPELLINGS):
        place = places.get(ours + name.removeprefix(spelled)) if name.startswith(spelled) else None
        if place is not None:
            return place
    return None


def _places_of(number: int, weight: Weight) -> Iterator[Place]:
    for parts in (weight.parts, *weight.others):
        for part in parts:
            if part.index is None and not part.is_cut and len(part.shape) == 2:
                yield Place(number, part, weight.shape[1])


def _acts_on_rows(form: Form, num_rows: int) -> bool:
    """Returns whether a form changes the order and scale of rows only, column by column."""
    probe = torch.arange(2.0 * num_rows).view(num_rows, 2) + 1
    try:
        both, first = form(probe), form(probe[:, :1])
    except (RuntimeError, IndexError, ValueError):
        return False
    return both.dim() == 2 and both.shape[1] == 2 and torch.equal(both[:, :1], first)
