"""Strict readers for fields of a config.json: a value of the wrong type is an error that names field and value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.types import QuireError


def whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Returns a whole number above 0; an absent or null field has the default, if there is one."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise QuireError("bad_config", f"{key}={value!r} must be a whole number above 0.", "Check config.json.")
    return value


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """Returns a number; an absent or null field has the default."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise QuireError("bad_config", f"{key}={value!r} must be a number.", "Check config.json.")
    return float(value)


def above_zero(config: Mapping[str, Any], key: str, default: float) -> float:
    """Returns a number above 0; an absent or null field has the default."""
    value = number(config, key, default)
    if not value > 0:
        raise QuireError("bad_config", f"{key}={value!r} must be above 0.", "Check config.json.")
    return value


def bound(config: Mapping[str, Any], key: str) -> float | None:
    """Returns an upper limit above 0; None if the field is absent or null, which means no limit."""
    return None if config.get(key) is None else above_zero(config, key, 0.0)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Returns a boolean; an absent or null field has the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise QuireError("bad_config", f"{key}={value!r} must be true or false.", "Check config.json.")
    return value


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config completed with the family's defaults. Null overrides a default (no window, for example),
    except in `rope_parameters`, where a family's own default holds.
    """
    omitted = ("rope_parameters",) if config.get("rope_parameters") is None else ()
    return {**defaults, **{key: value for key, value in config.items() if key not in omitted}}


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Requires that key-value heads divide query heads evenly, and that heads have an even size, which rope needs."""
    if num_heads % num_kv_heads or head_dim % 2:
        what = (
            f"{num_heads} heads of size {head_dim} with {num_kv_heads} key-value heads are not a valid attention shape."
        )
        raise QuireError("bad_config", what, "Check config.json.")


def check_layer_types(kinds: Any, known: Iterable[str], num_layers: int | None = None) -> None:
    """Validates `layer_types`: one known kind per layer. None: config.json has no such field."""
    if kinds is None:
        return
    if not isinstance(kinds, (list, tuple)):
        raise QuireError("bad_config", f"layer_types={kinds!r} must be a list.", "Check config.json.")
    known = tuple(known)
    for layer, kind in enumerate(kinds):
        if kind not in known:
            what = f"Layer type {kind!r} (layer {layer}) is not supported in a model of this type."
            raise QuireError("unsupported_model", what, f"Supported are {', '.join(known)}.")
    if num_layers is not None and len(kinds) != num_layers:
        what = f"layer_types has {len(kinds)} entries, but num_hidden_layers={num_layers}."
        raise QuireError("bad_config", what, "Check config.json.")


def check_layer_indices(indices: Any, key: str, num_layers: int) -> None:
    """Validates a list of layer indices. None: config.json has no such field."""
    if indices is None:
        return
    if not isinstance(indices, (list, tuple)) or not all(
        isinstance(index, int) and not isinstance(index, bool) and 0 <= index < num_layers for index in indices
    ):
        what = f"{key}={indices!r} must be a list of layer indices below {num_layers}."
        raise QuireError("bad_config", what, "Check config.json.")


def check_silu(config: Mapping[str, Any], key: str = "hidden_act") -> None:
    """Refuses an activation other than SiLU."""
    activation = config.get(key) or "silu"
    if activation not in ("silu", "swish"):
        what = f"Activation {activation!r} is not supported in a model of this type."
        raise QuireError("unsupported_model", what, "Supported is silu.")


def check_causal(config: Mapping[str, Any]) -> None:
    """Refuses bidirectional attention between text tokens. The value "vision" concerns image tokens only."""
    ahead = config.get("use_bidirectional_attention")
    if ahead and ahead != "vision":
        what = f"use_bidirectional_attention={ahead!r} is not supported: such a model attends to later tokens."
        raise QuireError("unsupported_model", what, "Use a model that generates text.")
