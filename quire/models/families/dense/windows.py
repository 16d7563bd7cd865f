"""Rules by which layers have a window, for configs without `layer_types`, and by which layers have rope. `families`
uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.layers.rope import RopeConfig
from quire.models.families.dense.config import DenseConfig, window_size
from quire.models.fields import flag

Fields = Mapping[str, Any]
NO_ROPE = RopeConfig(kind="none")
KINDS = ("full_attention", "sliding_attention")


def all_windowed(config: Fields, dense: DenseConfig) -> DenseConfig:
    """A window in every layer, also for families without `layer_types`, where the window may be null."""
    return replace(dense, windows=(window_size(config),) * dense.num_layers)


def windowed_by_kind(config: Fields, dense: DenseConfig) -> DenseConfig:
    """A window in every layer, unless `layer_types` is given."""
    return dense if config.get("layer_types") is not None else all_windowed(config, dense)


def upper_windowed(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Windows only if `use_sliding_window` is set, in layers from `max_window_layers` on."""
    if not flag(config, "use_sliding_window", False):
        return replace(dense, windows=(None,) * dense.num_layers)
    if config.get("layer_types") is not None:
        return dense
    window, first = window_size(config), config.get("max_window_layers", 28)
    return replace(dense, windows=tuple(window if index >= first else None for index in range(dense.num_layers)))


def early_windowed(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Windows only if `use_sliding_window` is set, in every second layer below `max_window_layers`."""
    if not flag(config, "use_sliding_window", False):
        return replace(dense, windows=(None,) * dense.num_layers)
    if config.get("layer_types") is not None:
        return dense
    window, stop = window_size(config), config.get("max_window_layers", 28)
    windows = tuple(window if index % 2 == 0 and index < stop else None for index in range(dense.num_layers))
    return replace(dense, windows=windows)


def windowed_where_no_rope(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Windows in the layers without rope, if `use_sliding_window` is set and `layer_types` is not given."""
    if config.get("layer_types") is not None or not flag(config, "use_sliding_window", False):
        return dense
    window = window_size(config)
    return replace(dense, windows=tuple(window if rope.kind == "none" else None for rope in dense.ropes))


def windowed_except_every(config: Fields, dense: DenseConfig, every: int) -> DenseConfig:
    """Without `layer_types`: a window in every layer except each `every`-th, and the rope of the layer's kind."""
    if config.get("layer_types") is not None:
        return dense
    window = window_size(config)
    windows = tuple(window if (i + 1) % every else None for i in range(dense.num_layers))
    given = config.get("rope_parameters") or {}
    if not set(given) & set(KINDS):
        return replace(dense, windows=windows)
    full, local = (RopeConfig.from_hf({**config, "rope_parameters": given.get(kind) or {}}) for kind in KINDS)
    return replace(dense, windows=windows, ropes=tuple(full if w is None else local for w in windows))


def windowed_except_first_of_four(config: Fields, dense: DenseConfig) -> DenseConfig:
    """Without `layer_types`: a window in every layer except the first of each four."""
    if config.get("layer_types") is not None:
        return dense
    window = window_size(config)
    return replace(dense, windows=tuple(window if index % 4 else None for index in range(dense.num_layers)))


def rope_where_windowed(dense: DenseConfig) -> DenseConfig:
    """Full-attention layers have no rope."""
    pairs = zip(dense.ropes, dense.windows, strict=True)
    return replace(dense, ropes=tuple(NO_ROPE if window is None else rope for rope, window in pairs))
