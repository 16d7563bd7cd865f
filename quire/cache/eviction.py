"""What is evicted first from the prefix tree, as a policy: least recently used, or least worth recomputing.

The tree first evicts units that are not expected to be used again, then others by ascending value, and pinned ones
last. A value may change only when a node is used, since the tree keeps its units in heaps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.cache.tree import Node
from quire.types import CacheSpec

FIRST_RATE = 1e-4  # seconds per token, before any step was timed


class CostPerByte:
    """Values a unit by the time to compute it again, over its bytes: late pages of long prompts attend to more tokens,
    and a snapshot stands for all tokens since the one before.

    The value is above that of the last evicted unit (GreedyDual), so a unit that is not used again falls behind newer
    ones, however dear it is.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], unit_bytes: Sequence[int], seconds: Callable[[int, int], float | None]
    ):
        """`seconds(tokens, context)`: how long it takes to compute so many tokens after so many others; None: not known
        yet."""
        self._page_tokens = specs[0].page_tokens
        self._tokens = [spec.page_tokens if spec.kind == "paged" else spec.snapshot_tokens for spec in specs]
        self._bytes = list(unit_bytes)
        self._seconds = seconds
        self._floors = [0.0] * len(specs)

    def value(self, node: Node, group: int) -> float:
        if node.worth is None:
            node.worth = {}
        known = node.worth.get(group)
        if known is not None and known[0] == node.last_use:
            return known[1]
        tokens = min(self._tokens[group], node.depth * self._page_tokens)
        context = node.depth * self._page_tokens - tokens
        seconds = self._seconds(tokens, context)
        value = self._floors[group] + (tokens * FIRST_RATE if seconds is None else seconds) / self._bytes[group]
        node.worth[group] = (node.last_use, value)
        return value

    def evicted(self, group: int, value: float) -> None:
        self._floors[group] = max(self._floors[group], value)


class LeastRecentlyUsed:
    """Values a unit by its last use."""

    def value(self, node: Node, group: int) -> float:
        return node.last_use

    def evicted(self, group: int, value: float) -> None:
        pass
