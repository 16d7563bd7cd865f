"""Presents a checkpoint under the tensor names of a transformers model, since files are often older than the model
code.

The loader wraps the checkpoints of `FallbackModel` in `RenamedCheckpoint`. transformers' conversion mapping defines
which names change, which tensors of a file are joined into one of the model (experts, matrices), and which are
reordered or split. Conversions beyond these are refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.layers.weights import PartSource
from quire.models.checkpoint import Checkpoint
from quire.models.fallback.attention import unsupported
from quire.models.weight_errors import bad_weights, missing_weights

_NUMBER = re.compile(r"\.(\d+)\.(?!.*\.\d+\.)")  # the last number in a name: the expert's, not the layer's
Rename = Callable[
    [str], tuple[str, str | None]
]  # file's name -> model's name, and the pattern by which tensors are joined


@dataclass(frozen=True, slots=True)
class JoinedPart:
    """Location of one of the file's tensors in a joined tensor."""

    entry: int | None  # index in the first dimension; None: some rows of the whole
    start: int  # in the dimension that follows, or in the first
    size: int
    name: str


@dataclass(frozen=True, slots=True)
class TensorJoin:
    """Tensors of a file, matched by these patterns in this order, that are one in the model."""

    patterns: list[str]
    concatenates: bool  # concatenated along rows; otherwise the tensors are numbered entries of a stack


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Makes one of the model's tensors from one in a file: reordered, transposed, or a part of it."""

    target: str  # pattern of its name
    change: Callable[[Tensor], Tensor]
    by_entries: bool  # applies to each entry of the first dimension on its own


class RenamedCheckpoint:
    """A view of a checkpoint with the tensor names and shapes of a transformers model."""

    def __init__(self, whole: Checkpoint, causal: Any):
        self.where = whole.where
        self._whole = whole
        self._names: dict[str, str] = {}  # model's name -> file's name
        self._joined: dict[str, list[JoinedPart]] = {}
        self._formed: dict[str, TensorForm] = {}
        wanted = {name: tuple(tensor.shape) for name, tensor in causal.state_dict().items()}
        rename, joins, forms = _read_conversions(causal, wanted)
        members: dict[str, dict[str, dict[int, str]]] = {}  # model's name -> pattern -> number -> file's name
        for name in whole.shapes:
            ours, pattern = (name, None) if name in wanted else rename(name)
            number = _number(name, joins[pattern]) if pattern in joins else None
            if pattern in forms:
                for form in forms[pattern]:
                    formed = ours.replace(forms[pattern][0].target, form.target)
                    self._names[formed], self._formed[formed] = name, form
            elif pattern is None or number is None:
                self._names[ours] = name
            else:
                members.setdefault(ours, {}).setdefault(pattern, {})[number] = name
        self.shapes = {ours: self._shape(ours, whole.shapes[name]) for ours, name in self._names.items()}
        for ours, found in members.items():
            self._join(ours, found, joins[next(iter(found))], (wanted.get(ours) or (0,))[0])

    def _shape(self, ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the model's tensor, given that of the file's."""
        form = self._formed.get(ours)
        if form is None:
            return shape
        try:
            return tuple(form.change(torch.empty(shape, device="meta")).shape)
        except Exception:  # too few dimensions, or an odd number of rows
            what = f"{self.where} holds {self._names[ours]} in the wrong shape: {list(shape)}"
            raise bad_weights(f"{what}, which can't become {ours}") from None

    def _join(self, ours: str, found: dict[str, dict[int, str]], join: TensorJoin, num_entries: int) -> None:
        """Adds a joined tensor. `found`: the file's tensors by pattern and number; the model has `num_entries` of
        them.
        """
        shapes = self._whole.shapes
        sample = next(iter(next(iter(found.values())).values()))
        entries = range(1 if join.concatenates else max(num_entries, 1 + max(max(names) for names in found.values())))
        absent = next((pattern for pattern in join.patterns if pattern not in found), None)
        if absent is not None:
            raise bad_weights(f"{self.where} holds {sample}, but no {absent} beside it")
        missing = [
            _NUMBER.sub(f".{entry}.", name, 1)
            for names in found.values()
            for name in [names[min(names)]]
            for entry in entries
            if entry not in names
        ]
        if missing:
            raise missing_weights(self.where, missing)
        places, start, columns = [], 0, shapes[sample][1:]
        for pattern in join.patterns:
            rows = shapes[found[pattern][0]][0]
            for entry in entries:
                name = found[pattern][entry]
                if shapes[name] != (rows, *columns):
                    what = f"{self.where} holds {name} in the wrong shape: {list(shapes[name])}"
                    raise bad_weights(f"{what} where others of its kind have {[rows, *columns]}")
                places.append(JoinedPart(None if join.concatenates else entry, start, rows, name))
            start += rows
        self._joined[ours] = places
        self.shapes[ours] = (start, *columns) if join.concatenates else (len(entries), start, *columns)

    def read(self, name: str, target: Tensor, index: int | None = None) -> None:
        if name in self._formed:
            self._read_formed(name, target, index)
            return
        if name not in self._joined:
            self._whole.read(self._names[name], target, index)
            return
        for place in self._joined[name]:
            if index is None or index == place.entry:
                entry = target if index is not None or place.entry is None else target[place.entry]
                self._whole.read(place.name, entry[place.start : place.start + place.size])

    def _read_formed(self, name: str, target: Tensor, index: int | None) -> None:
        """Reads a changed tensor, entry by entry where possible: a stack of experts may be most of a model."""
        form, file_name = self._formed[name], self._names[name]
        shape = self._whole.shapes[file_name]
        if not form.by_entries:
            read = torch.empty(shape, dtype=target.dtype, device=target.device)
            self._whole.read(file_name, read)
            target.copy_(form.change(read) if index is None else form.change(read)[index])
            return
        for entry in range(shape[0]) if index is None else (index,):
            read = torch.empty(1, *shape[1:], dtype=target.dtype, device=target.device)
            self._whole.read(file_name, read[0], entry)
            (target if index is not None else target[entry]).copy_(form.change(read)[0])

    def source(self, name: str, index: int | None = None) -> PartSource:
        return self._whole.source(self._names[name], index)


def _number(name: str, join: TensorJoin) -> int | None:
    """Returns the index of a file's tensor in its stack."""
    if join.concatenates:
        return 0
    found = _NUMBER.search(name)
    return None if found is None else int(found[1])


def _read_conversions(
    causal: Any, wanted: dict[str, Any]
) -> tuple[Rename, dict[str, TensorJoin], dict[str, list[TensorForm]]]:
    """Returns the function that renames tensors, and by pattern the joins and the forms of transformers'
    conversions.
    """
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping as find
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import rename_source_key
    except ImportError:  # a release without conversions
        return lambda name: (name, None), {}, {}
    conversions = [*_conversions_of_whole(causal.config, find), *get_model_conversion_mapping(causal)]
    renamings: list[Any] = [conversion for conversion in conversions if not hasattr(conversion, "operations")]
    converters: list[Any] = [conversion for conversion in conversions if hasattr(conversion, "operations")]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    joins = {pattern: join for pattern, converter in converter_of.items() if (join := _join_of(converter)) is not None}
    forms = {pattern: form for pattern, converter in converter_of.items() if (form := _forms_of(converter)) is not None}

    def rename(name: str) -> tuple[str, str | None]:
        ours, pattern = rename_source_key(name, renamings, converters, causal.base_model_prefix, wanted)
        if pattern is not None and pattern not in joins and pattern not in forms:
            done = ", ".join(type(operation).__name__ for operation in converter_of[pattern].operations)
            raise unsupported(
                causal.config.model_type, f"its checkpoints need an unsupported conversion of {name} ({done})"
            )
        return ours if ours in wanted else ours.replace("model.language_model.", "model.", 1), pattern

    return rename, joins, forms


def _conversions_of_whole(config: Any, find: Callable[[str], list[Any] | None]) -> list[Any]:
    """Returns the conversions of the multimodal model that has this language model, unless the language model has its
    own: published files may use the multimodal names.
    """
    if find(config.model_type) is not None:
        return []
    kinds: list[Any] = [kind for kind in vars(sys.modules[type(config).__module__]).values() if isinstance(kind, type)]
    wholes = [kind for kind in kinds if (getattr(kind, "sub_configs", None) or {}).get("text_config") is type(config)]
    return [one for whole in wholes for one in find(whole.model_type) or ()]


def _join_of(converter: Any) -> TensorJoin | None:
    """Returns the join of a converter: a stack of experts, each of one or more concatenated matrices, or a
    concatenation. None: the converter does something else.
    """
    done = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
    concatenates = done == [("Concatenate", 0)]
    if concatenates or (done[:1] == [("MergeModulelist", 0)] and done[1:] in ([], [("Concatenate", 1)])):
        return TensorJoin(list(converter.source_patterns), concatenates)
    return None


def _forms_of(converter: Any) -> list[TensorForm] | None:
    """Returns the forms of a converter: interleaves and transposes, then a split into equal parts. None: it does
    something else.
    """
    if len(converter.source_patterns) != 1:
        return None
    steps: list[Callable[[Tensor], Tensor]] = []
    dims: set[int] = set()
    *firsts, last = converter.operations
    parts = type(last).__name__ == "Chunk" and getattr(last, "num_shards_attribute", None) is None
    for operation in firsts if parts else converter.operations:
        if type(operation).__name__ == "Interleave":
            steps.append(partial(_deinterleave, dim=operation.dim, back=getattr(operation, "inverse", False)))
            dims |= {operation.dim}
        elif type(operation).__name__ == "Transpose" and not getattr(operation, "check_dims", False):
            steps.append(partial(torch.transpose, dim0=operation.dim0, dim1=operation.dim1))
            dims |= {operation.dim0, operation.dim1}
        else:
            return None
    targets = list(converter.target_patterns)
    dims |= {last.dim} if parts else set()
    if not parts and len(targets) > 1:
        return None

    def change(x: Tensor, part: int) -> Tensor:
        for step in steps:
            x = step(x)
        return x.unflatten(last.dim, (len(targets), -1)).select(last.dim, part) if parts else x

    return [TensorForm(target, partial(change, part=part), min(dims) > 0) for part, target in enumerate(targets)]


def _deinterleave(x: Tensor, dim: int, back: bool) -> Tensor:
    """Deinterleaves two kinds of rows along a dimension; `back`: interleaves them."""
    return x.unflatten(dim, (2, -1) if back else (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)
