"""States that transformers models keep in a form of their own, outside any transformers cache.

Some models return their states and take them again with the next tokens; others keep them in their modules. In both
cases they are tensors with a row dimension and a fixed size. `find_opaque_states` finds them in a dry run.
`OpaqueRowStates` passes the states of some rows of a step from their slots and collects them. A row that begins gets
none: the model initializes it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.step import Step
from quire.models.fallback.recurrent_states import (
    Key,
    LayerStates,
    RowStates,
    StateRecorder,
    StateSlots,
    StateTensor,
)

ALL_LAYERS = 0  # states of all layers are one entry, since nothing tells which layer has which
_PROBES = ((2, 3), (4, 5))  # rows and tokens of two calls, whose differences in shape identify the row dimension


@dataclass(frozen=True, slots=True)
class OpaqueForm:
    """Where a model has its states, and the row dimension of each tensor; None: it has none."""

    returned: Mapping[str, Any]  # by output and parameter name, with the values of the dry run
    attributes: tuple[tuple[str, str], ...]  # (path of the module, attribute)
    row_dims: tuple[int | None, ...]

    def tensors(self, body: nn.Module, output: Any) -> list[Tensor]:
        found = [output[name] for name in self.returned]
        return [*_leaves(found), *(_attribute(body, place) for place in self.attributes)]


class OpaqueStateRecorder(StateRecorder):
    """Records a dry run in which the model keeps states in its own form."""

    def body_arguments(self, body: nn.Module, taken: Mapping[str, Any]) -> dict[str, Any]:
        return {"use_cache": True, **{name: None for name in ("cache_params",) if name in taken}}


class OpaqueRowStates(RowStates):
    """The states of some rows in the model's own form. Either all rows begin, or none does."""

    def __init__(self, form: OpaqueForm, slots: StateSlots, step: Step, caches: Mapping[str, Tensor]):
        super().__init__(slots, step, caches)
        self._form = form
        self._begins = step.len_bounds[0] == step.counts[0]

    def body_arguments(self, body: nn.Module, taken: Mapping[str, Any]) -> dict[str, Any]:
        form = self._form
        _forget(body, form.attributes)  # an earlier call that failed may have left states
        if self._begins:
            return {"use_cache": True, **dict.fromkeys(form.returned)}
        tensors = self._in_their_form()
        returned = {name: _rebuild(template, tensors) for name, template in form.returned.items()}
        for path, name in form.attributes:
            setattr(body.get_submodule(path), name, next(tensors))
        return {"use_cache": True, **returned}

    def _in_their_form(self) -> Iterator[Tensor]:
        states = iter(self.states_of(ALL_LAYERS).values())
        recorded = list(_leaves(list(self._form.returned.values())))
        for place, dim in enumerate(self._form.row_dims):
            if dim is None:  # a token count or the like in the returned value
                yield torch.zeros_like(recorded[place], device=self._step.tokens.device)
            else:
                yield next(states).movedim(0, dim).contiguous()

    def collect_states(self, body: nn.Module, output: Any) -> None:
        form = self._form
        kept = [
            x.movedim(dim, 0)
            for x, dim in zip(form.tensors(body, output), form.row_dims, strict=True)
            if dim is not None
        ]
        self._layer, self._states = ALL_LAYERS, {_key(index): x for index, x in enumerate(kept)}
        _forget(body, form.attributes)


def find_opaque_states(
    body: nn.Module, taken: Collection[str], probe: Callable[[int, int], Any], dtype: torch.dtype
) -> tuple[OpaqueForm, LayerStates] | None:
    """Finds the states that a body keeps by itself. `taken`: its parameter names; `probe(rows, tokens)`: calls it and
    returns its output. Returns None if there are none, or if they grow with the tokens.
    """
    unset = [(path, name) for path, module in body.named_modules() for name, x in vars(module).items() if x is None]
    seen: list[list[Tensor]] = []
    for num_rows, count in _PROBES:
        output = probe(num_rows, count)
        returned = {name: x for name, x in output.items() if name in taken and next(_leaves(x), None) is not None}
        attributes = tuple(place for place in unset if isinstance(_attribute(body, place), Tensor))
        seen.append(OpaqueForm(returned, attributes, ()).tensors(body, output))
        _forget(body, attributes)
    row_dims: list[int | None] = []
    for few, many in zip(*seen, strict=True):
        changed = [dim for dim in range(few.dim()) if few.shape[dim] != many.shape[dim]]
        if changed and [(few.shape[dim], many.shape[dim]) for dim in changed] != [(_PROBES[0][0], _PROBES[1][0])]:
            return None
        row_dims.append(changed[0] if changed else None)
    # a tensor without rows may be a table, or belong to any row
    if None in row_dims[len(row_dims) - len(attributes) :]:
        return None
    of_rows = [x.movedim(dim, 0) for x, dim in zip(seen[0], row_dims, strict=True) if dim is not None]
    kept = [StateTensor(tuple(x.shape[1:]), None if x.dtype == dtype else x.dtype) for x in of_rows]
    states = {_key(index): state for index, state in enumerate(kept)}
    return (OpaqueForm(returned, attributes, tuple(row_dims)), states) if states else None


def _key(index: int) -> Key:
    return "recurrent", index


def _attribute(body: nn.Module, place: tuple[str, str]) -> Any:
    path, name = place
    return getattr(body.get_submodule(path), name)


def _forget(body: nn.Module, attributes: tuple[tuple[str, str], ...]) -> None:
    for path, name in attributes:
        setattr(body.get_submodule(path), name, None)


def _leaves(x: Any) -> Iterator[Tensor]:
    """Yields all tensors in lists, mappings and objects, but not in configs."""
    if isinstance(x, Tensor):
        yield x
    elif (parts := _parts(x)) is not None:
        for part in parts.values():
            yield from _leaves(part)


def _rebuild(x: Any, tensors: Iterator[Tensor]) -> Any:
    """Returns a copy of `x` with other tensors, in the order of `_leaves`."""
    if isinstance(x, Tensor):
        return next(tensors)
    parts = _parts(x)
    if parts is None:
        return x
    others = {name: _rebuild(part, tensors) for name, part in parts.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(others.values())
    if isinstance(x, dict):
        return others
    made = copy.copy(x)
    vars(made).update(others)
    return made


def _parts(x: Any) -> Mapping[Any, Any] | None:
    """Returns the parts of a container by key; None for anything else."""
    if isinstance(x, (type, nn.Module, StateRecorder)) or hasattr(x, "model_type"):
        return None
    if isinstance(x, (list, tuple)):
        return dict(enumerate(x))
    if isinstance(x, dict):
        return x
    return vars(x) if hasattr(x, "__dict__") else None
