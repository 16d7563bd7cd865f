"""What sets GGUF files of one architecture apart from those of others. `gguf_names`, `gguf_hybrid` and `gguf_special`
have the tables, `gguf` reads files with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.files.gguf import GGUFFile


@dataclass(frozen=True, slots=True)
class GGUFStyle:
    names: Mapping[str, str] = field(default_factory=dict)  # within a layer, where they are not the usual ones
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the config, which no metadata gives
    permuted: bool = False  # queries and keys are kept so that rope turns neighbours
    patterned: bool = False  # which layers have a window is the family's own rule
    without_keys: str | None = None  # type of the layers that have no heads of keys, where some have none
    metadata: Mapping[str, str] = field(default_factory=dict)  # more fields of the config -> what gives them
    whole_names: Mapping[str, str] = field(default_factory=dict)  # within a layer, of tensors that are no module's
    apart: frozenset[str] = frozenset()  # metadata that `more` reads, since it is not one number for all layers
    more: Callable[[GGUFFile, Mapping[str, Any]], Mapping[str, Any]] | None = None  # fields, by those read so far
    layers: str = "model.layers"  # what all names within a layer begin with
    top: Mapping[str, str] = field(default_factory=dict)  # names outside of layers, where they are not the usual ones
    # Within a layer: the shape of tensors that files keep, or tools leave, with more or fewer dimensions of one.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
