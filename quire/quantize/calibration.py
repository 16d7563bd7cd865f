"""What the columns of each matrix are multiplied with, from a calibration text: mean squares, and products of columns.

A hook in front of every linear layer of the float model collects it. Matrices with the same input share the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.files.source import ModelFiles
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.layers.moe import MoE
from quire.layers.weights import Part, Weight, own_weights
from quire.models.loading.loader import build_model, load_model, read_config
from quire.runtime.reading import CPU, PAGE, read_stretch
from quire.types import QuireError

MIN_TOKENS = 512  # of a calibration text
STRETCHES, LENGTH = 32, 512


@dataclass(slots=True)
class Inputs:
    """Sums over the tokens that reached a layer."""

    squares: Tensor  # [columns] float32
    products: Tensor | None = None  # [columns, columns] float32: of each pair of columns
    num_tokens: int = 0

    def add(self, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        self.squares += x.square().sum(0)
        if self.products is not None:
            self.products += x.t() @ x
        self.num_tokens += len(x)

    @property
    def mean_squares(self) -> Tensor:
        return self.squares / max(1, self.num_tokens)


@dataclass(slots=True)
class FloatModel:
    """The source in float32, and the checkpoint tensors of its linear layers."""

    model: Any
    linears: list[tuple[Linear, tuple[Part, ...]]] = field(default_factory=list)  # in the order of the layers
    mixtures: list[tuple[MoE, tuple[Part, ...]]] = field(default_factory=list)  # and their experts' first matrices

    @classmethod
    def load(cls, files: ModelFiles) -> FloatModel:
        how: dict[str, Any] = {"dtype": "float32", "device": CPU, "page_tokens": PAGE}
        loaded: Any = load_model(files, max_model_len=None, kernels="torch", **how).model
        blank, _ = build_model(read_config(files), ops=loaded.ops, **how)
        found = cls(loaded)
        for mine, its in zip(loaded.modules(), blank.modules(), strict=True):
            parts = tuple(
                part for name, weight in own_weights(its) if _is_matrix(name, weight) for part in weight.parts
            )
            if isinstance(mine, Linear) and parts:
                found.linears.append((mine, parts))
            elif isinstance(mine, MoE):
                assert isinstance(its.experts, Experts)
                weights = dict(own_weights(its.experts))
                found.mixtures.append((mine, weights["gate_up"].parts))
        return found

    @contextmanager
    def watched(self, inputs: dict[str, Inputs], wants: Callable[[str], bool], products: bool) -> Iterator[None]:
        """Collects into `inputs`, by tensor name, what reaches the layers whose tensors are wanted."""
        handles = []
        for linear, parts in self.linears:
            if any(wants(part.name) for part in parts):
                found = _shared_inputs(inputs, parts, linear.in_features, products)
                handles.append(linear.register_forward_pre_hook(_collect(found), with_kwargs=True))
        for mixture, parts in self.mixtures:  # all experts see its input; what reaches second matrices is not known
            if any(wants(part.name) for part in parts):
                width = parts[0].shape[-1]
                handles.append(
                    mixture.register_forward_pre_hook(
                        _collect(_shared_inputs(inputs, parts, width, False)), with_kwargs=True
                    )
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _is_matrix(name: str, weight: Weight) -> bool:
    return name != "bias" and weight.dim() > 1


def _shared_inputs(inputs: dict[str, Inputs], parts: Sequence[Part], columns: int, products: bool) -> Inputs:
    square = torch.zeros(columns, columns) if products else None
    found = Inputs(torch.zeros(columns), square)
    for part in parts:
        inputs[part.name] = found
    return found


def _collect(found: Inputs) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0]
        norm = module.norm if isinstance(module, MoE) else kwargs.get("norm")
        found.add(x if norm is None else norm(x))

    return hook


def collect(
    source: FloatModel,
    stretches: Sequence[Sequence[int]],
    *,
    wants: Callable[[str], bool] = lambda name: True,
    products: bool = False,
    on_stretch: Callable[[int], None] = lambda done: None,
) -> dict[str, Inputs]:
    """Returns what reaches each matrix while the model reads the stretches, by tensor name."""
    inputs: dict[str, Inputs] = {}
    with source.watched(inputs, wants, products):
        for done, tokens in enumerate(stretches, 1):
            read_stretch(source.model, tokens)
            on_stretch(done)
    return inputs


def read_imatrix(path: Path) -> dict[str, Tensor]:
    """Returns the mean squares that llama.cpp's `llama-imatrix` has written, by GGUF tensor name."""
    from quire.files.gguf import open_gguf
    from quire.models.gguf.checkpoint import read_rows

    file = open_gguf(path)
    found = {}
    for name, tensor in file.tensors.items():
        if not name.endswith(".in_sum2"):
            continue
        counts = file.tensors.get(f"{name.removesuffix('.in_sum2')}.counts")
        if counts is None:
            raise QuireError("bad_gguf", f"{path} has {name} and no counts for it.", "Compute it again.")
        sums = read_rows(tensor, 0, tensor.shape[0])
        number = read_rows(counts, 0, counts.shape[0])
        sums, number = sums.view(-1, tensor.shape[-1]), number.view(-1, 1)
        found[name.removesuffix(".in_sum2")] = sums.sum(0) / number.sum().clamp_min(1)
    if not found:
        what = f"{path} is a GGUF file without importance weights."
        raise QuireError("invalid_parameter", what, "Give a file of llama-imatrix, or a text.", param="imatrix")
    return found
