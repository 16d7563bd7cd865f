"""Finds the longest prefix of a prompt that every group has in the prefix tree, and holds the cache's counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.cache.tiers.host import HostTier
from quire.cache.tiers.seam import BlockId
from quire.cache.tree import ABSENT, Node, PrefixTree
from quire.types import CacheSpec

Loads = dict[int, dict[int, int]]  # group -> page index -> host unit


@dataclass(slots=True)
class Match:
    """The longest prefix that all groups have: its length in tokens and the node of each of its pages."""

    length: int = 0
    reach: int = 0  # length the full-attention groups have; beyond `length` where a snapshot or window is missing
    nodes: list[Node] = field(default_factory=list)
    # What the device lacks; a state's snapshot at the last page. With loads `nodes` ends where a page has no node.
    loads: Loads = field(default_factory=dict)

    def num_on_device(self, groups: Sequence[int], page_tokens: int) -> int:
        """Return how many of the pages these groups need not load any of."""
        firsts = [min(self.loads[group]) for group in groups if self.loads.get(group)]
        return min([self.length // page_tokens, *firsts])


class Lookup:
    """Matches keys. Full attention needs every page of a prefix, a window its last pages, a state its snapshot."""

    def __init__(self, specs: Sequence[CacheSpec], tree: PrefixTree):
        self._tree = tree
        self._page_tokens = specs[0].page_tokens
        self._full = [g for g, spec in enumerate(specs) if spec.kind == "paged" and spec.window is None]
        self._state = [g for g, spec in enumerate(specs) if spec.kind == "state"]
        windows = {g: spec.window for g, spec in enumerate(specs) if spec.kind == "paged" and spec.window is not None}
        self._simple = self._full[0] if len(self._full) == len(specs) == 1 else None
        self._window_pages = {g: -(-(window - 1) // self._page_tokens) for g, window in windows.items()}

    def longest(self, keys: Sequence[bytes]) -> Match:
        """Return the longest prefix of these pages after which every group can continue."""
        nodes: list[Node] = []
        if (
            self._simple is not None
        ):  # one group of full attention: a fast loop, since a long prompt has hundreds of pages
            get, group = self._tree.get, self._simple
            for key in keys:
                node = get(key)
                if node is None or node.units[group] == ABSENT:
                    break
                nodes.append(node)
            length = len(nodes) * self._page_tokens
            return Match(length, length, nodes)
        best = 0
        runs = dict.fromkeys(
            self._window_pages, 0
        )  # per windowed group: number of consecutive pages present up to this one
        for num_pages, key in enumerate(keys, start=1):
            node = self._tree.get(key)
            if node is None or not all(node.units[group] != ABSENT for group in self._full):
                break
            nodes.append(node)
            for group in runs:
                runs[group] = runs[group] + 1 if node.units[group] != ABSENT else 0
            if self._offers(node, num_pages, runs):
                best = num_pages
        return Match(best * self._page_tokens, len(nodes) * self._page_tokens, nodes[:best])

    def with_host(self, keys: Sequence[bytes], found: Match, host: HostTier) -> Match:
        """Return the longest prefix that device and host memory have together; `found` if the host adds nothing."""
        if not host.num_blocks:
            return found
        match = self.extend(keys, found, lambda group, index: host.has(BlockId(keys[index], group)))
        if match is not found:
            for group, index in self.lacking(match):
                match.loads.setdefault(group, {})[index] = host.unit_of(BlockId(keys[index], group))
        return match

    def extend(self, keys: Sequence[bytes], found: Match, has: Callable[[int, int], bool]) -> Match:
        """Return the longest prefix of the device together with what `has(group, page index)`, without loads; `found`
        if that is not longer."""
        first = found.length // self._page_tokens
        if self._simple is not None and (first >= len(keys) or not has(self._simple, first)):
            return found  # the usual case of a model with full attention alone
        nodes: list[Node] = []
        for key in keys:
            node = self._tree.get(key)
            if node is None:
                break  # no node without its ancestors
            nodes.append(node)

        def is_there(group: int, index: int) -> bool:
            return (index < len(nodes) and nodes[index].units[group] != ABSENT) or has(group, index)

        best, reach = self.longest_where(len(keys), is_there)
        if best <= first:
            return found
        size = self._page_tokens
        return Match(best * size, max(reach * size, found.reach) if self._full else best * size, nodes[:best])

    def longest_where(self, num_keys: int, has: Callable[[int, int], bool]) -> tuple[int, int]:
        """Return after how many pages every group can continue with what `has(group, page index)`, and how many pages
        the groups of full attention have."""
        best = reach = 0
        runs = dict.fromkeys(self._window_pages, 0)
        for index in range(num_keys):
            num_pages = index + 1
            if not all(has(group, index) for group in self._full):
                break
            reach = num_pages
            for group in runs:
                runs[group] = runs[group] + 1 if has(group, index) else 0
            windows = all(runs[group] >= min(num_pages, count) for group, count in self._window_pages.items())
            if windows and all(has(group, index) for group in self._state):
                best = num_pages
        return best, reach

    def needed(self, num_pages: int) -> list[tuple[int, int]]:
        """Return the group and page index of all that a prefix of so many pages consists of."""
        firsts = dict.fromkeys(self._full, 0) | dict.fromkeys(self._state, num_pages - 1)
        firsts |= {group: max(0, num_pages - count) for group, count in self._window_pages.items()}
        return [(group, index) for group, first in firsts.items() for index in range(max(0, first), num_pages)]

    def lacking(self, match: Match) -> list[tuple[int, int]]:
        """Return the group and page index of all that the device lacks of a match."""
        nodes = match.nodes
        return [
            (group, index)
            for group, index in self.needed(match.length // self._page_tokens)
            if index >= len(nodes) or nodes[index].units[group] == ABSENT
        ]

    def _offers(self, node: Node, num_pages: int, runs: dict[int, int]) -> bool:
        """Whether windows and states can continue after this page."""
        for group, window_pages in self._window_pages.items():
            if runs[group] < min(num_pages, window_pages):
                return False
        return all(node.units[group] != ABSENT for group in self._state)


@dataclass(slots=True)
class CacheStats:
    """Counters since the start, in tokens (`*_tokens`), units or pages."""

    lookup_tokens: int = 0
    hit_tokens: int = 0
    loaded_tokens: int = 0  # hit tokens that only a tier below the device had
    evicted_units: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    copied_on_write: int = 0
