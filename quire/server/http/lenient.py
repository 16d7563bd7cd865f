"""`--lenient`: leaves unknown fields out of a body instead of refusing it. The reply names them in a header.

Bodies are read with it where they are decoded, in this process or in a text worker.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

MAX_NAMED = 16  # fields named in the header


def without_unknown(model: type[BaseModel], value: Any) -> tuple[Any, list[str]]:
    """The value without the fields that the model does not have, and the names of these."""
    dropped: list[str] = []
    return _known(model, value, "", dropped), dropped


def _known(model: type[BaseModel], value: Any, place: str, dropped: list[str]) -> Any:
    if not isinstance(value, dict):
        return value
    fields = _fields_of(model)
    kept = {}
    for name, inner in value.items():
        where = f"{place}.{name}" if place else name
        if name not in fields:
            if len(dropped) < MAX_NAMED:
                dropped.append(where[:200])
            continue
        models = fields[name]
        if isinstance(inner, dict):
            chosen = _fitting(models, inner)
            kept[name] = inner if chosen is None else _known(chosen, inner, where, dropped)
        elif models and isinstance(inner, list) and inner and isinstance(inner[0], dict):
            chosen_models = [_fitting(models, one) if isinstance(one, dict) else None for one in inner]
            kept[name] = [
                one if chosen is None else _known(chosen, one, f"{where}[{index}]", dropped)
                for index, (one, chosen) in enumerate(zip(inner, chosen_models, strict=True))
            ]
        else:
            kept[name] = inner
    return kept


def _fitting(models: tuple[type[BaseModel], ...], value: dict[str, Any]) -> type[BaseModel] | None:
    """The model of a value among those of a field: the one whose `type` is the value's."""
    if not models:
        return None
    for model in models:
        field = model.model_fields.get("type")
        if field is not None and value.get("type") in _literals(field.annotation):
            return model
    return models[0] if len(models) == 1 else None


@cache
def _fields_of(model: type[BaseModel]) -> dict[str, tuple[type[BaseModel], ...]]:
    """The fields of a model by the client's names, each with the models that its value may have."""
    return {field.alias or name: tuple(_models_in(field.annotation)) for name, field in model.model_fields.items()}


def _models_in(kind: Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for inner in get_args(kind) for model in _models_in(inner)]


def _literals(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(value for inner in get_args(kind) for value in _literals(inner))
