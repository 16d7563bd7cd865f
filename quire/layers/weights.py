"""Weights with their loading rule: the checkpoint tensors of each weight, and the rows that each tensor fills.

Layers create weights on the meta device, without memory. The loader walks a model, reads each weight's parts and
replaces it by the real tensor. Two weights with the same parts (a tied embedding and head) become one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.files.ggml_types import GGMLType
from quire.types import QuireError

Form = Callable[[Tensor], Tensor]  # transforms a checkpoint's tensor into rows of a weight


@runtime_checkable
class RowOrder(Protocol):
    """A form that only reorders rows, so that quantized blocks can be kept unchanged."""

    def order(self, num_rows: int) -> Tensor:
        """Returns, for each row of the weight, its index in the checkpoint's tensor, [rows] int64."""


@dataclass(frozen=True, slots=True)
class Reorder:
    """The `RowOrder` of a function that reorders the rows of any tensor."""

    by: Form

    def order(self, num_rows: int) -> Tensor:
        return self.by(torch.arange(num_rows))

    def __call__(self, weight: Tensor) -> Tensor:
        return self.by(weight)


@dataclass(frozen=True, slots=True)
class ScaleTensor:
    """A form that multiplies a tensor by a factor."""

    by: float

    def __call__(self, weight: Tensor) -> Tensor:
        return weight * self.by


def scale_by(factor: float) -> ScaleTensor | None:
    """Returns the form that scales by this factor; None for 1, so that quantized blocks can be kept unchanged."""
    return None if factor == 1.0 else ScaleTensor(factor)


Span = tuple[int, int]  # first and one past the last


@dataclass(frozen=True, slots=True)
class Share:
    """The rows and the columns of a weight that one rank holds."""

    rows: tuple[Span, ...] | None = None  # ascending; None: all
    columns: Span | None = None  # None: all

    def size(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of this share of a weight."""
        rows = shape[0] if self.rows is None else sum(stop - start for start, stop in self.rows)
        columns = shape[1:] if self.columns is None else (self.columns[1] - self.columns[0], *shape[2:])
        return (rows, *columns)

    def take(self, tensor: Tensor) -> Tensor:
        """Returns this share of the whole tensor."""
        if self.rows is not None:
            tensor = torch.cat([tensor[start:stop] for start, stop in self.rows])
        return tensor if self.columns is None else tensor[:, self.columns[0] : self.columns[1]]

    def parts(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Returns the pieces of a weight's parts in this share, in the order of its rows."""
        if self == WHOLE:
            return tuple(parts)
        entries = [entry for part in parts for entry in part.entries()]
        width = max((part.stop for part in parts), default=0)
        pieces, start = [], 0
        for first, last in self.rows or ((0, width),):
            for part in entries:
                low, high = max(first, part.start), min(last, part.stop)
                if low < high:
                    rows = None if (low, high) == (part.start, part.stop) else (low - part.start, high - part.start)
                    where = start + low - first
                    pieces.append(replace(part, start=where, stop=where + high - low, rows=rows, columns=self.columns))
            start += last - first
        return tuple(pieces)


WHOLE = Share()


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor, or one entry of it, and the rows of a weight that it fills."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    start: int
    stop: int  # exclusive
    index: int | None = None  # entry of the tensor's first dimension; None: the whole tensor
    form: Form | None = None  # transforms the tensor or entry into these rows; None: unchanged
    rows: Span | None = None  # the formed tensor's rows that are these rows; None: all
    columns: Span | None = None  # the formed tensor's columns that the weight has; None: all

    @property
    def is_cut(self) -> bool:
        """Whether the weight has some of the tensor's rows or columns only."""
        return self.rows is not None or self.columns is not None

    def entries(self) -> Sequence[Part]:
        """Returns this part as one for each entry of a tensor that stacks matrices, so that each can be cut."""
        if len(self.shape) != 3 or self.index is not None or self.form is not None:
            return (self,)
        num, rows = self.shape[:2]
        return [
            replace(self, index=e, start=self.start + e * rows, stop=self.start + (e + 1) * rows) for e in range(num)
        ]

    @property
    def keeps_rows(self) -> bool:
        """Whether the form changes at most the order of rows, so that quantized blocks can be kept unchanged."""
        return self.form is None or isinstance(self.form, RowOrder)


@dataclass(frozen=True, slots=True)
class PartSource:
    """The rows of one part in a checkpoint."""

    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]  # (first, count) -> these rows as floats, [count, columns]
    type_name: str = "F32"  # GGUF's name of the type
    blocks: Tensor | None = None  # [bytes] uint8: the tensor's raw bytes, if these are usable; None: only `read` works
    order: Tensor | None = None  # [rows] int64: index into the rows of `blocks` of each row; None: in order

    def reordered(self, order: Tensor) -> PartSource:
        """Returns the same rows in another order. order [rows] int64"""

        @cache
        def read_all() -> Tensor:
            return self.read(0, self.shape[0])

        def read(first: int, count: int) -> Tensor:
            rows = order[first : first + count]
            low, stop = int(rows.min()), int(rows.max()) + 1
            if stop - low > 4 * count:  # scattered rows: each call would read most of the matrix
                return read_all()[rows]
            return self.read(low, stop - low)[rows - low]

        return replace(self, read=read, order=order if self.order is None else self.order[order])

    def cut(self, name: str, rows: Span | None, columns: Span | None) -> PartSource:
        """Returns some rows and columns of tensor `name`. Its blocks are cut between two of them, or not at all."""
        first, stop = rows or (0, self.shape[0])
        low, high = columns or (0, self.shape[-1])

        def read(start: int, count: int) -> Tensor:
            found = self.read(first + start, min(count, stop - first - start))
            return found if columns is None else found[:, low:high]

        blocks, order = self.blocks, self.order
        if blocks is not None:
            kind = GGMLType.__members__.get(self.type_name)
            if kind is None:  # packed in a way that only its own decoder knows
                return PartSource((stop - first, high - low), read)
            by_row = blocks.view(self.shape[0], -1)  # [rows, bytes]
            if order is not None:
                order = order[first:stop]
            else:
                by_row = by_row[first:stop]
            if columns is not None:
                if low % kind.block_size or (high % kind.block_size and high != self.shape[-1]):
                    what = f"{name} can't be split at column {low if low % kind.block_size else high}: its"
                    what = f"{what} {self.type_name} blocks have {kind.block_size} columns."
                    raise QuireError("unsupported_split", what, "Use another number of ranks.")
                by_row = by_row[:, kind.num_bytes(low) : kind.num_bytes(high)]
            blocks = by_row.reshape(-1)
        return replace(self, shape=(stop - first, high - low), read=read, blocks=blocks, order=order)

    def split(self, num: int) -> list[PartSource]:
        """Returns the `num` matrices of a tensor that stacks them, along a first dimension or by rows."""
        return [self.entry(index, num) for index in range(num)]

    def entry(self, index: int, num: int) -> PartSource:
        """Returns one of the `num` stacked matrices."""
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
    """Packs the parts of a weight that is not stored as a tensor. Equal parts and packing make one shared weight."""

    def num_bytes(self, weight: Weight) -> int:
        """Returns the bytes of the packed weight."""

    def pack(self, weight: Weight, sources: list[PartSource]) -> Any: ...


class Weight(nn.Parameter):
    """A parameter on the meta device with its loading rule."""

    parts: tuple[Part, ...]
    others: tuple[tuple[Part, ...], ...]  # alternative layouts of the weight in checkpoints
    stored: torch.dtype  # type after loading, which differs from `dtype` if the owner repacks the weight
    is_scaled: bool  # has per-row scales after loading, in float32
    packing: Packing | None  # None: stored as a tensor
    share: Share  # what one rank holds of the weight that the parts describe; `shape` is the shape of this share

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
        weight.share = WHOLE
        return weight

    def cut(self, share: Share) -> Weight:
        """Returns this share of the weight, which is loaded and stored like the whole. Its parts stay the whole's."""
        assert self.share == WHOLE
        weight = Weight(share.size(tuple(self.shape)), self.dtype, self.parts, self.others)
        weight.stored, weight.is_scaled, weight.packing, weight.share = self.stored, self.is_scaled, self.packing, share
        return weight

    def store_scaled(self, dtype: torch.dtype) -> None:
        """Declares that the weight is stored in this type with per-row scales."""
        self.stored, self.is_scaled = dtype, True

    def parts_in(self, found: Mapping[str, object]) -> tuple[Part, ...]:
        """Returns the parts of this rank's share, in the layout that a checkpoint with these tensors has; in the
        default layout if none matches.

        A layout matches if one of the names that distinguish it is in `found`. Of several matches, the first one whose
        shapes equal those in `found` is used, else the first one.
        """
        return self.share.parts(self.layout_in(found))

    def layout_in(self, found: Mapping[str, object]) -> tuple[Part, ...]:
        """Returns the parts of the whole weight, as `parts_in` those of the share."""
        layouts = (self.parts, *self.others)
        if len(layouts) == 1:
            return self.parts
        common = set.intersection(*({part.name for part in parts} for parts in layouts))
        named = [parts for parts in layouts if any(p.name in found and p.name not in common for p in parts)]
        fitting = (parts for parts in named if all(found.get(part.name) == part.shape for part in parts))
        return next(fitting, named[0] if named else self.parts)

    @property
    def kept_as(self) -> tuple[object, ...]:
        """The identity of the stored weight: weights with equal values share one copy."""
        return self.parts, self.share, self.packing, self.stored

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weight after loading, with its scales."""
        if self.packing is not None:
            return self.packing.num_bytes(self)
        return math.prod(self.shape) * self.stored.itemsize + (4 * self.shape[0] if self.is_scaled else 0)

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        """Returns a weight that equals one checkpoint tensor."""
        return cls(shape, dtype, (Part(name, shape, 0, shape[0]),))

    @classmethod
    def stacked(cls, sources: list[tuple[str, int]], columns: tuple[int, ...], dtype: torch.dtype) -> Weight:
        """Returns a weight that stacks several checkpoint tensors, each (name, rows), by rows."""
        parts, start = [], 0
        for name, rows in sources:
            parts.append(Part(name, (rows, *columns), start, start + rows))
            start += rows
        return cls((start, *columns), dtype, tuple(parts))


@dataclass(frozen=True, slots=True)
class ScaleRows:
    """A form that multiplies consecutive blocks of rows, each (rows, factor)."""

    by: tuple[tuple[int, float], ...]

    def __call__(self, weight: Tensor) -> Tensor:
        parts = weight.split([rows for rows, _ in self.by])
        return torch.cat([part * factor for part, (_, factor) in zip(parts, self.by, strict=True)])


# cuBLAS takes four to seven times as long for a product with 65,537 rows (a vocabulary) as for one with 65,544, at 8 to
# 256 tokens. So a large matrix on a GPU is padded with zero rows to a multiple of ROW_MULTIPLE.
ROW_MULTIPLE = 8
PADDED_FROM_ROWS = 1024


def empty_padded_matrix(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor to fill. A large matrix on a GPU is followed by the zero rows that `with_zero_rows` needs."""
    spare = -shape[0] % ROW_MULTIPLE
    if not spare or len(shape) != 2 or shape[0] < PADDED_FROM_ROWS or device.type != "cuda":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.zeros(shape[0] + spare, shape[1], dtype=dtype, device=device)[: shape[0]]


def with_zero_rows(matrix: Tensor) -> Tensor | None:
    """Returns the matrix with its zero rows from `empty_padded_matrix`; None if it has none."""
    rows, columns = matrix.shape
    whole = rows + -rows % ROW_MULTIPLE
    room = matrix.untyped_storage().nbytes() // matrix.element_size() - matrix.storage_offset()
    return matrix.data.as_strided((whole, columns), (columns, 1)) if rows < whole and whole * columns <= room else None


def set_forms(module: nn.Module, forms: Sequence[Form | None], only: str | None = None) -> None:
    """Sets the form of each part, in order, of a module's weights (a linear layer's merged weight and bias).

    `only`: the name of the one weight to change; None: all.
    """
    for name, weight in own_weights(module):
        if only not in (None, name):
            continue
        assert len(weight.parts) == len(forms)
        weight.parts = tuple(replace(part, form=form) for part, form in zip(weight.parts, forms, strict=True))


def add_other_names(module: nn.Module, *names: str) -> None:
    """Adds a layout with other tensor names to the weights of a norm or linear layer.

    A different number of names than parts stands for tensors of equal size, stacked by rows.
    """
    for kind, weight in own_weights(module):
        forms = [part.form for part in weight.parts] if len(weight.parts) == len(names) else [None] * len(names)
        rows, columns = max(part.stop for part in weight.parts), weight.parts[0].shape[1:]  # of all ranks together
        sources = [(f"{name}.{kind}", rows // len(names)) for name in names]
        parts = Weight.stacked(sources, columns, weight.dtype).parts
        other = tuple(replace(part, form=form) for part, form in zip(parts, forms, strict=True))
        weight.others = (*weight.others, other)


def own_weights(module: nn.Module) -> list[tuple[str, Weight]]:
    """Returns the weights on the meta device that this module itself owns, by name."""
    return [(name, weight) for name, weight in module.named_parameters(recurse=False) if isinstance(weight, Weight)]


def iter_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, Weight]]:
    """Yields every weight on the meta device: (owning module, name in it, weight)."""
    for module in model.modules():
        for name, weight in own_weights(module):
            yield module, name, weight


def put_weight(module: nn.Module, name: str, value: Any) -> None:
    """Replaces a weight on the meta device by its tensor or packed form."""
    if isinstance(value, Tensor):
        setattr(module, name, nn.Parameter(value, requires_grad=False))
    else:
        delattr(module, name)
        setattr(module, name, value)


def weights_bytes(model: nn.Module) -> int:
    """Returns the bytes of all weights after loading; shared weights count once."""
    return sum({weight.kept_as: weight.stored_bytes for _, _, weight in iter_weights(model)}.values())
