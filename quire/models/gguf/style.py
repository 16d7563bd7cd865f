"""What distinguishes GGUF files of one architecture. `tensor_names`, `hybrid_styles` and `special_styles` have the
tables; `checkpoint` reads files with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.files.gguf import GGUFFile


@dataclass(frozen=True, slots=True)
class GGUFStyle:
    """Tensor names and metadata of one GGUF architecture, where they differ from the usual ones."""

    names: Mapping[str, str] = field(default_factory=dict)  # within a layer: GGUF name -> checkpoint name
    fields: Mapping[str, Any] = field(default_factory=dict)  # config fields that no metadata gives
    permuted: bool = False  # queries and keys are ordered so that rope rotates adjacent elements
    has_own_windows: bool = False  # the family's own rule determines which layers have a window
    keyless_type: str | None = None  # type of layers without key-value heads
    metadata: Mapping[str, str] = field(default_factory=dict)  # further config fields -> metadata keys
    # within a layer, names of tensors that are no module's
    whole_names: Mapping[str, str] = field(default_factory=dict)
    read_apart: frozenset[str] = frozenset()  # metadata keys that `extra_fields` reads, since values differ by layer
    # computes further fields from those read so far
    extra_fields: Callable[[GGUFFile, Mapping[str, Any]], Mapping[str, Any]] | None = None
    layers: str = "model.layers"  # prefix of names within layers
    top_names: Mapping[str, str] = field(default_factory=dict)  # names outside of layers, where not the usual ones
    # Shapes of tensors within a layer that files store with more or fewer dimensions of size 1.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
