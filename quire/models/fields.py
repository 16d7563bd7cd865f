"""Reads fields of a config.json strictly: a value of the wrong kind is an error that names it. Family files call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.types import QuireError


def whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number above 0; a field that is absent or null has the default, if there is one."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise QuireError("bad_config", f"{key}={value!r} must be a whole number above 0.", "Check config.json.")
    return value


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise QuireError("bad_config", f"{key}={value!r} must be a number.", "Check config.json.")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise QuireError("bad_config", f"{key}={value!r} must be true or false.", "Check config.json.")
    return value


def check_silu(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        what = f"Activation {activation!r} is not supported in a model of this type."
        raise QuireError("unsupported_model", what, "Supported is silu.")
