"""What a look-up in the prefix tree found, and what the cache has counted so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.cache.tree import Node


@dataclass(slots=True)
class Match:
    """The longest prefix every group can offer: its length, and the node of each of its pages."""

    length: int = 0
    reach: int = 0  # how far the paged groups alone would go; beyond `length` where a snapshot is missing
    nodes: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class CacheStats:
    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    evicted_units: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    copied_on_write: int = 0
