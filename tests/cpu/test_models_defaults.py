"""A field that config.json leaves out has the value transformers gives it, for every field of every family.

Where we know no value the config is refused, and where ours would make other tensors the checkpoint is; what may not be
is a model that loads and computes something else.
"""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from quire.layers.rope import RopeConfig
from quire.layers.weights import iter_weights
from quire.models.loading.language_model_part import language_model_config
from quire.models.loading.loader import build_model
from quire.models.registry import FAMILIES, find_family
from quire.types import QuireError
from tests.cpu.families.harness import Family, all_families, model_type

Fields = dict[str, Any]
OWN = [family for family in all_families() if model_type(family) in FAMILIES]
KEPT = ("model_type", "text_config", "vision_config")
# How far positions go is a limit, not a computation: where config.json does not say it, ours may be another.
LIMITS = ("max_positions", "original_len")


def read(config: Fields) -> Any:
    text = language_model_config(config) or config
    try:
        return find_family(text["model_type"]).read_config(text)
    except QuireError:
        return None


def tensors(config: Fields) -> Any:
    try:
        model, _ = build_model(
            language_model_config(config) or config, dtype="float32", device=torch.device("cpu"), page_tokens=16
        )
    except QuireError:
        return None
    return {part.name: part.shape for _, _, weight in iter_weights(model) for part in weight.parts}


def computed(value: Any) -> Any:
    """A family's config as nested tuples, without what changes nothing."""
    if isinstance(value, RopeConfig) and value.kind in ("default", "dynamic", "none"):
        return value.kind == "none", value.theta if value.kind != "none" else None
    if isinstance(value, RopeConfig):
        value = replace(value, share=value.share if value.kind == "proportional" else 1.0)
    if is_dataclass(value):
        return tuple((f.name, computed(getattr(value, f.name))) for f in fields(value) if f.name not in LIMITS)
    if isinstance(value, dict):
        return tuple((key, computed(value[key])) for key in sorted(value))
    return tuple(map(computed, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("family", OWN, ids=str)
def test_what_is_left_out_is_what_transformers_takes_it_for(family: Family) -> None:
    kind = type(family.config())
    given = family.config().to_dict()
    assert computed(read(kind.from_dict(copy.deepcopy(given)).to_dict())) == computed(read(given))
    wrong = []
    for key in [key for key in given if key not in KEPT]:
        less = {name: copy.deepcopy(value) for name, value in given.items() if name != key}
        try:
            theirs = kind.from_dict(copy.deepcopy(less)).to_dict()
        except Exception:  # without it there is no model
            continue
        ours, want = read(less), read(theirs)
        if ours is not None and want is not None and computed(ours) != computed(want):
            wrong += [key] if tensors(less) == tensors(theirs) else []
    assert not wrong, f"left out, {wrong} mean something else than in transformers"


def test_a_gemma_4_ends_with_a_layer_that_sees_everything() -> None:
    """Whatever its config.json says: transformers corrects it."""
    config = next(family for family in OWN if family.name == "gemma4 experts").config()
    other = [*config.layer_types[:-1], "sliding_attention"]
    assert type(config)(**{**config.to_dict(), "layer_types": list(other)}).layer_types == config.layer_types
    assert computed(read({**config.to_dict(), "layer_types": other})) == computed(read(config.to_dict()))
