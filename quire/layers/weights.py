"""Weights that know where they come from: each names the checkpoint tensors that fill it, and which rows each fills.

Layers make them on the meta device, where they cost nothing; the loader walks a model, fills them and puts the real
tensors in their place. Two weights with the same parts (a tied embedding and head) end up as one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Form = Callable[[Tensor], Tensor]  # from a tensor as a checkpoint holds it to our rows of it


@runtime_checkable
class RowOrder(Protocol):
    """A form that only puts rows into another order: blocks can stay as they are."""

    def order(self, num_rows: int) -> Tensor:
        """[rows] int64: which row of the checkpoint's tensor each of ours is"""


@dataclass(frozen=True, slots=True)
class Reorder:
    """A form that does nothing but that, made of a function that does it to any tensor's rows."""

    by: Form

    def order(self, num_rows: int) -> Tensor:
        return self.by(torch.arange(num_rows))

    def __call__(self, weight: Tensor) -> Tensor:
        return self.by(weight)


@dataclass(frozen=True, slots=True)
class Scale:
    """A form: what a tensor is multiplied with when it is loaded."""

    by: float

    def __call__(self, weight: Tensor) -> Tensor:
        return weight * self.by


def scale_by(factor: float) -> Scale | None:
    """By one nothing is scaled, and blocks can stay as they are."""
    return None if factor == 1.0 else Scale(factor)


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor, or one entry of it, and the rows of a weight that it fills: `start` to before `stop`."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    start: int
    stop: int
    index: int | None = None  # which entry of the tensor's first dimension; None: all of them
    form: Form | None = None  # how what was read becomes these rows; None: as it is

    @property
    def keeps_rows(self) -> bool:
        """The rows are a tensor's own, in whatever order: blocks can stay as they are."""
        return self.form is None or isinstance(self.form, RowOrder)


@dataclass(frozen=True, slots=True)
class PartSource:
    """One part's rows as a checkpoint has them."""

    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]  # (first, count) -> those rows as floats, [count, columns]
    type_name: str = "F32"  # as GGUF calls it
    blocks: Tensor | None = None  # the tensor's own bytes, [bytes] uint8, where they can be had as they are
    order: Tensor | None = None  # [rows] int64: which row of `blocks` each row is; None: as they come

    def reordered(self, order: Tensor) -> PartSource:
        """The same rows in another order, [rows] int64."""

        @cache
        def read_all() -> Tensor:
            return self.read(0, self.shape[0])

        def read(first: int, count: int) -> Tensor:
            rows = order[first : first + count]
            low, stop = int(rows.min()), int(rows.max()) + 1
            if stop - low > 4 * count:  # from all over the matrix, which would be read again for each of its pieces
                return read_all()[rows]
            return self.read(low, stop - low)[rows - low]

        return replace(self, read=read, order=order if self.order is None else self.order[order])

    def split(self, num: int) -> list[PartSource]:
        """The `num` matrices of a tensor that holds them behind, or below, each other."""
        return [self.entry(index, num) for index in range(num)]

    def entry(self, index: int, num: int) -> PartSource:
        assert self.order is None and self.shape[0] % num == 0
        rows = self.shape[1] if len(self.shape) == 3 else self.shape[0] // num

        def read(first: int, count: int) -> Tensor:
            if len(self.shape) == 3:
                return self.read(index, 1)[0][first : first + count]
            return self.read(index * rows + first, count)

        blocks = None
        if self.blocks is not None:
            size = len(self.blocks) // num
            blocks = self.blocks[index * size : (index + 1) * size]
        return PartSource((rows, self.shape[-1]), read, self.type_name, blocks)


class Packing(Protocol):
    """How a weight that is no tensor is made of its parts. Weights with equal parts and packings are shared."""

    def num_bytes(self, weight: Weight) -> int:
        """Once packed."""

    def pack(self, weight: Weight, sources: list[PartSource]) -> Any: ...


class Weight(nn.Parameter):
    """A parameter still on meta, with its loading rule."""

    parts: tuple[Part, ...]
    others: tuple[tuple[Part, ...], ...]  # other ways in which checkpoints hold the same weight
    stored: torch.dtype  # the type it ends up in, where its owner repacks it after loading,
    is_scaled: bool  # with a float32 for each of its rows
    packing: Packing | None  # where it ends up as something else than a tensor

    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parts: tuple[Part, ...],
        others: tuple[tuple[Part, ...], ...] = (),
    ) -> Weight:
        weight = super().__new__(cls, torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        weight.parts = parts
        weight.others = others
        weight.stored = dtype
        weight.is_scaled = False
        weight.packing = None
        return weight

    def store_scaled(self, dtype: torch.dtype) -> None:
        """It ends up in this type, with a scale for each row."""
        self.stored, self.is_scaled = dtype, True

    def parts_in(self, found: Mapping[str, object]) -> tuple[Part, ...]:
        """The parts as a checkpoint with tensors of these names holds them; the usual ones where none fits. Names that
        all ways have in common tell nothing. Of several ways the first is taken whose shapes are those of `found`, or
        else the first."""
        layouts = (self.parts, *self.others)
        if len(layouts) == 1:
            return self.parts
        common = set.intersection(*({part.name for part in parts} for parts in layouts))
        named = [parts for parts in layouts if any(p.name in found and p.name not in common for p in parts)]
        fitting = (parts for parts in named if all(found.get(part.name) == part.shape for part in parts))
        return next(fitting, named[0] if named else self.parts)

    @property
    def kept_as(self) -> tuple[object, ...]:
        """Weights of which this is equal are kept once."""
        return self.parts, self.packing, self.stored

    @property
    def stored_bytes(self) -> int:
        if self.packing is not None:
            return self.packing.num_bytes(self)
        return math.prod(self.shape) * self.stored.itemsize + (4 * self.shape[0] if self.is_scaled else 0)

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        """A weight that is exactly one checkpoint tensor."""
        return cls(shape, dtype, (Part(name, shape, 0, shape[0]),))

    @classmethod
    def stacked(cls, sources: list[tuple[str, int]], columns: tuple[int, ...], dtype: torch.dtype) -> Weight:
        """Several checkpoint tensors, (name, rows), one below the other."""
        parts, start = [], 0
        for name, rows in sources:
            parts.append(Part(name, (rows, *columns), start, start + rows))
            start += rows
        return cls((start, *columns), dtype, tuple(parts))


@dataclass(frozen=True, slots=True)
class ScaleRows:
    """A form: rows, in order so many by so much."""

    by: tuple[tuple[int, float], ...]

    def __call__(self, weight: Tensor) -> Tensor:
        parts = weight.split([rows for rows, _ in self.by])
        return torch.cat([part * factor for part, (_, factor) in zip(parts, self.by, strict=True)])


# cuBLAS takes four to seven times as long for a product with 65,537 rows, a vocabulary, as for one with 65,544, at 8 to
# 256 tokens. A large matrix on a GPU that has no whole number of these has zeros behind it, for such products.
WHOLE_ROWS = 8
MANY_ROWS = 1024


def empty_matrix(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor to be filled, with zeros behind it where `whole_rows` is to find them."""
    spare = -shape[0] % WHOLE_ROWS
    if not spare or len(shape) != 2 or shape[0] < MANY_ROWS or device.type != "cuda":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.zeros(shape[0] + spare, shape[1], dtype=dtype, device=device)[: shape[0]]


def whole_rows(matrix: Tensor) -> Tensor | None:
    """The matrix and what `empty_matrix` left behind it, if anything."""
    rows, columns = matrix.shape
    whole = rows + -rows % WHOLE_ROWS
    room = matrix.untyped_storage().nbytes() // matrix.element_size() - matrix.storage_offset()
    return matrix.data.as_strided((whole, columns), (columns, 1)) if rows < whole and whole * columns <= room else None


def set_forms(module: nn.Module, forms: Sequence[Form | None], only: str | None = None) -> None:
    """How each checkpoint tensor of a linear layer, in order, becomes its rows of the merged weight (and bias).
    `only`: of the one of this name alone."""
    for name, weight in own_weights(module):
        if only not in (None, name):
            continue
        assert len(weight.parts) == len(forms)
        weight.parts = tuple(replace(part, form=form) for part, form in zip(weight.parts, forms, strict=True))


def also_called(module: nn.Module, *names: str) -> None:
    """What checkpoints call the tensors of a norm, or of a linear layer, other than what it was made with: as many, or
    another number, of equal size, one below the other."""
    for kind, weight in own_weights(module):
        forms = [part.form for part in weight.parts] if len(weight.parts) == len(names) else [None] * len(names)
        sources = [(f"{name}.{kind}", weight.shape[0] // len(names)) for name in names]
        parts = Weight.stacked(sources, tuple(weight.shape[1:]), weight.dtype).parts
        other = tuple(replace(part, form=form) for part, form in zip(parts, forms, strict=True))
        weight.others = (*weight.others, other)


def own_weights(module: nn.Module) -> list[tuple[str, Weight]]:
    """The weights still on meta that belong to this module itself, by name."""
    return [(name, weight) for name, weight in module.named_parameters(recurse=False) if isinstance(weight, Weight)]


def iter_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, Weight]]:
    """Every weight still on meta: (the module that owns it, its name there, the weight)."""
    for module in model.modules():
        for name, weight in own_weights(module):
            yield module, name, weight


def put_weight(module: nn.Module, name: str, value: Any) -> None:
    """Replace a weight on meta by its real tensor, or by what it was packed into."""
    if isinstance(value, Tensor):
        setattr(module, name, nn.Parameter(value, requires_grad=False))
    else:
        delattr(module, name)
        setattr(module, name, value)


def weights_bytes(model: nn.Module) -> int:
    """Bytes the weights will take once loaded, shared ones counted once."""
    return sum({weight.kept_as: weight.stored_bytes for _, _, weight in iter_weights(model)}.values())
