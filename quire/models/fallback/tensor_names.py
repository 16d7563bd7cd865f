"""A checkpoint under the names that a model of transformers has for its tensors: files are often older than its code.

The loader wraps checkpoints in `OwnNames` for models of `fallback`. Which name became which, whether experts that lie
one by one in the file, or matrices that lie apart, are one tensor in the model, and which tensors lie there in another
order, or several as one, transformers itself knows; what it would do beyond that to the numbers of a file is refused.
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
from quire.models.fallback.attention import unsupported
from quire.models.loading.sources import Checkpoint, bad_weights, lacks

_NUMBER = re.compile(r"\.(\d+)\.(?!.*\.\d+\.)")  # the last one: an expert's, not its layer's
Rename = Callable[
    [str], tuple[str, str | None]
]  # a file's name -> the model's, and by which pattern tensors are joined


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a joined tensor one of the file's lies."""

    entry: int | None  # of the first dimension; None: the file's is no entry, but some rows of the whole
    start: int  # of the dimension that follows, or of the first one
    size: int
    name: str


@dataclass(frozen=True, slots=True)
class Join:
    """Tensors of a file, found by these patterns in this order, that are one in the model."""

    patterns: list[str]
    below: bool  # they lie below each other; else they are numbered, and are entries, of several matrices or of one


@dataclass(frozen=True, slots=True)
class Form:
    """Makes one of the model's tensors of one in a file: its rows in another order, or some of them."""

    target: str  # pattern of its name
    change: Callable[[Tensor], Tensor]
    by_entries: bool  # it does the same to each entry of the first dimension


class OwnNames:
    def __init__(self, whole: Checkpoint, causal: Any):
        self.where = whole.where
        self._whole = whole
        self._names: dict[str, str] = {}  # the model's -> the file's
        self._joined: dict[str, list[Place]] = {}
        self._formed: dict[str, Form] = {}
        wanted = {name: tuple(tensor.shape) for name, tensor in causal.state_dict().items()}
        rename, joins, forms = _read_conversions(causal, wanted)
        members: dict[str, dict[str, dict[int, str]]] = {}  # the model's name -> pattern -> number -> the file's name
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
        """Of the model's tensor, if the file's has this one."""
        form = self._formed.get(ours)
        if form is None:
            return shape
        try:
            return tuple(form.change(torch.empty(shape, device="meta")).shape)
        except Exception:  # too few dimensions, or an odd number of rows
            what = f"{self.where} holds {self._names[ours]} in the wrong shape: {list(shape)}"
            raise bad_weights(f"{what}, which makes no {ours}") from None

    def _join(self, ours: str, found: dict[str, dict[int, str]], join: Join, num_entries: int) -> None:
        """`found`: for each pattern the file's tensors by number; the model has `num_entries` of them."""
        shapes = self._whole.shapes
        sample = next(iter(next(iter(found.values())).values()))
        entries = range(1 if join.below else max(num_entries, 1 + max(max(names) for names in found.values())))
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
            raise lacks(self.where, missing)
        places, start, columns = [], 0, shapes[sample][1:]
        for pattern in join.patterns:
            rows = shapes[found[pattern][0]][0]
            for entry in entries:
                name = found[pattern][entry]
                if shapes[name] != (rows, *columns):
                    what = f"{self.where} holds {name} in the wrong shape: {list(shapes[name])}"
                    raise bad_weights(f"{what} where others of its kind have {[rows, *columns]}")
                places.append(Place(None if join.below else entry, start, rows, name))
            start += rows
        self._joined[ours] = places
        self.shapes[ours] = (start, *columns) if join.below else (len(entries), start, *columns)

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
        """No more of the file's tensor is at hand than must be: experts behind each other may be most of a model."""
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


def _number(name: str, join: Join) -> int | None:
    """Which entry a file's tensor is."""
    if join.below:
        return 0
    found = _NUMBER.search(name)
    return None if found is None else int(found[1])


def _read_conversions(causal: Any, wanted: dict[str, Any]) -> tuple[Rename, dict[str, Join], dict[str, list[Form]]]:
    """How transformers renames; for each pattern by which it joins tensors all those that are joined with it; and for
    each by which it takes one apart, or orders it anew, what is made of it."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping as find
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import rename_source_key
    except ImportError:  # a release that renames nothing
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
            raise unsupported(causal.config.model_type, f"its checkpoints hold {name} in another form ({done})")
        return ours if ours in wanted else ours.replace("model.language_model.", "model.", 1), pattern

    return rename, joins, forms


def _conversions_of_whole(config: Any, find: Callable[[str], list[Any] | None]) -> list[Any]:
    """Of the model with images whose language model this is, unless it has some of its own: it is published as a part
    of that one, and named so."""
    if find(config.model_type) is not None:
        return []
    kinds: list[Any] = [kind for kind in vars(sys.modules[type(config).__module__]).values() if isinstance(kind, type)]
    wholes = [kind for kind in kinds if (getattr(kind, "sub_configs", None) or {}).get("text_config") is type(config)]
    return [one for whole in wholes for one in find(whole.model_type) or ()]


def _join_of(converter: Any) -> Join | None:
    """Experts one behind the other, each of one matrix, or of several one below the other; or just these. None: it
    does something else."""
    done = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
    below = done == [("Concatenate", 0)]
    if below or (done[:1] == [("MergeModulelist", 0)] and done[1:] in ([], [("Concatenate", 1)])):
        return Join(list(converter.source_patterns), below)
    return None


def _forms_of(converter: Any) -> list[Form] | None:
    """Rows that take turns one behind the other, dimensions the other way round; then equal parts. None: something
    else."""
    if len(converter.source_patterns) != 1:
        return None
    steps: list[Callable[[Tensor], Tensor]] = []
    dims: set[int] = set()
    *firsts, last = converter.operations
    parts = type(last).__name__ == "Chunk" and getattr(last, "num_shards_attribute", None) is None
    for operation in firsts if parts else converter.operations:
        if type(operation).__name__ == "Interleave":
            steps.append(partial(_take_turns, dim=operation.dim, back=getattr(operation, "inverse", False)))
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

    return [Form(target, partial(change, part=part), min(dims) > 0) for part, target in enumerate(targets)]


def _take_turns(x: Tensor, dim: int, back: bool) -> Tensor:
    """What lies in turn along a dimension, one kind behind the other; `back`: the other way round."""
    return x.unflatten(dim, (2, -1) if back else (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)
