"""Which layers of a dense model see only a window, by the rules that families have where config.json does not name
layers one by one, and which of them turn. `dense_families` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.layers.rope import RopeConfig
from quire.models.families.dense.config import DenseConfig, window_size
from quire.models.loading.fields import flag

Fields = Mapping[str, Any]
NO_ROPE = RopeConfig(kind="none")
KINDS = ("full_attention", "sliding_attention")


def all_windowed(config: Fields, dense: DenseConfig) -> DenseConfig:
    """A window in every layer. Where families do not know `layer_types`, it changes nothing."""
    return replace(dense, windows=(window_size(config),) * dense.num_layers)


def windowed_by_kind(config: Fields, dense: DenseConfig) -> DenseConfig:
    """A window in every layer, unless `layer_types` says otherwise."""
    return dense if config.get("layer_types") is not None else all_windowed(config, dense)


def upper_windowed(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Windows only where they are switched on, and then in the upper layers."""
    if not flag(config, "use_sliding_window", False):
        return replace(dense, windows=(None,) * dense.num_layers)
    if config.get("layer_types") is not None:
        return dense
    window, first = window_size(config), config.get("max_window_layers", 28)
    return replace(dense, windows=tuple(window if index >= first else None for index in range(dense.num_layers)))


def early_windowed(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Windows only where they are switched on, and then in every other one of the lower layers."""
    if not flag(config, "use_sliding_window", False):
        return replace(dense, windows=(None,) * dense.num_layers)
    if config.get("layer_types") is not None:
        return dense
    window, stop = window_size(config), config.get("max_window_layers", 28)
    windows = tuple(window if index % 2 == 0 and index < stop else None for index in range(dense.num_layers))
    return replace(dense, windows=windows)


def windowed_where_still(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Windows in the layers that do not turn, where they are switched on and `layer_types` does not say otherwise."""
    if config.get("layer_types") is not None or not flag(config, "use_sliding_window", False):
        return dense
    window = window_size(config)
    return replace(dense, windows=tuple(window if rope.kind == "none" else None for rope in dense.ropes))


def but_every(config: Fields, dense: DenseConfig, every: int) -> DenseConfig:
    """Where config.json has no `layer_types`: a window in every layer but each `every`-th, and its kind's rope."""
    if config.get("layer_types") is not None:
        return dense
    window = window_size(config)
    windows = tuple(window if (i + 1) % every else None for i in range(dense.num_layers))
    given = config.get("rope_parameters") or {}
    if not set(given) & set(KINDS):
        return replace(dense, windows=windows)
    full, local = (RopeConfig.from_hf({**config, "rope_parameters": given.get(kind) or {}}) for kind in KINDS)
    return replace(dense, windows=windows, ropes=tuple(full if w is None else local for w in windows))


def but_first_of_four(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Where config.json has no `layer_types`: a window in every layer but the first of each four."""
    if config.get("layer_types") is not None:
        return dense
    window = window_size(config)
    return replace(dense, windows=tuple(window if index % 4 else None for index in range(dense.num_layers)))


def turned_where_windowed(dense: DenseConfig) -> DenseConfig:
    """Layers that see everything do not turn."""
    pairs = zip(dense.ropes, dense.windows, strict=True)
    return replace(dense, ropes=tuple(NO_ROPE if window is None else rope for rope, window in pairs))
