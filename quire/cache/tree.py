"""The prefix tree: which page-aligned prefixes are in the cache, one tree for all groups of a model.

A node is one page of tokens after one exact prefix. Its key is that of the chain (`chain.py`) at its last token. For
each group it has the unit with the page's bytes, or ABSENT. `CacheIndex` inserts nodes in commit and
matches them at admission; `UnitLedger` evicts units when a pool has no free one: least recently used first, leaves
before their parents, pinned prefixes last.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

ABSENT = -1
EvictionRank = tuple[bool, bool, float]  # pinned, not spare, value; the lowest is evicted first


class Node:
    """One page of tokens after one exact prefix."""

    __slots__ = (
        "below",
        "children",
        "depth",
        "hits",
        "key",
        "last_use",
        "parent",
        "passed",
        "pins",
        "spare",
        "tokens",
        "units",
        "worth",
    )

    def __init__(self, key: bytes, parent: Node | None, tokens: bytes, num_groups: int):
        self.key = key
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0  # number of pages up to and including this one
        self.tokens = tokens
        self.units = [ABSENT] * num_groups
        self.children: dict[bytes, Node] = {}  # by the bytes of their tokens
        self.below = [0] * num_groups  # per group: number of children with a unit
        self.hits = 0
        self.pins = 0
        self.spare = False  # a snapshot with a later one on the same path and no hits since: evicted first
        self.passed = 0  # a bit per group whose window has passed this page without a start there: evicted first
        self.last_use = 0
        self.worth: dict[int, tuple[int, float]] | None = None  # a policy's: group -> last use, value


class Eviction(Protocol):
    """The order in which units are evicted; see `eviction.py`."""

    def value(self, node: Node, group: int) -> float:
        """Return what a node's unit is worth; it changes only when the node is used."""
        ...

    def evicted(self, group: int, value: float) -> None:
        """Take note that a unit of this value was evicted."""
        ...


class PrefixTree:
    """All cached prefixes, with the eviction order of their units."""

    def __init__(self, num_groups: int, leaf_first: list[bool], atomic: list[bool]):
        """`leaf_first[g]`: a page of this group is useless without all pages before it. `atomic[g]`: the units of this
        group are snapshots, each usable without the others."""
        self._num_groups = num_groups
        self._leaf_first = leaf_first
        self._atomic = atomic
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self.get = self._nodes.get  # key -> node or None, bound once: a prompt makes hundreds of lookups
        self.num_changes = 0  # number of units attached and detached; a match is valid until it changes
        self._clock = 0
        self._order = 0
        self._holders: list[dict[int, Node]] = [{} for _ in range(num_groups)]  # per group: unit -> its node
        self._heaps: list[list[tuple[EvictionRank, int, Node]]] = [[] for _ in range(num_groups)]
        self.eviction: Eviction | None = None  # None: least recently used first

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, key: bytes) -> Node | None:
        """Return the node of a key, which may be a root's."""
        return self._nodes.get(key) or self._roots.get(key)

    def nodes(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def ensure(
        self, root: bytes, keys: list[bytes], first: int, depth: int, pages: Callable[[int, int], list[bytes]]
    ) -> list[Node]:
        """Return the nodes of `keys[first:depth]`; create missing ones and their missing ancestors. `pages(i, j)`
        returns the token bytes of pages i to j (exclusive)."""
        have = depth
        while have and keys[have - 1] not in self._nodes:
            have -= 1
        nodes = [self._nodes[key] for key in keys[first:have]]
        node = self._nodes[keys[have - 1]] if have else self._roots.get(root)
        if node is None:
            node = self._roots[root] = Node(root, None, b"", self._num_groups)
        for index, page in enumerate(pages(have, depth) if have < depth else (), start=have):
            key = keys[index]
            child = self._nodes[key] = node.children[page] = Node(key, node, page, self._num_groups)
            if index >= first:
                nodes.append(child)
            node = child
        return nodes

    def attach(self, group: int, new: list[tuple[Node, int]]) -> None:
        """Set each node's unit of `group`; the caller has added the tree's reference to it."""
        self.num_changes += len(new)
        holders = self._holders[group]
        for node, unit in new:
            assert node.units[group] == ABSENT and node.parent is not None
            node.units[group] = unit
            node.passed &= ~(1 << group)
            node.parent.below[group] += 1
            holders[unit] = node

    def touch(self, nodes: Iterable[Node]) -> None:
        """Mark nodes as used now, in ascending order of recency."""
        clock = self._clock
        for node in nodes:
            clock += 1
            node.last_use = clock
        self._clock = clock

    def mark_unshared_evictable(self, group: int, units: Iterable[int]) -> int:
        """Mark units with one reference left as evictable where it is the tree's; return how many those are."""
        holders = self._holders[group]
        nodes = [holders[unit] for unit in units if unit in holders]
        self.touch(nodes)
        for node in nodes:
            if not node.below[group] or not self._leaf_first[group]:
                self.mark_evictable(node, group)
        return len(nodes)

    def mark_evictable(self, node: Node, group: int) -> None:
        """Queue a node for eviction: only the tree references its unit of `group`."""
        if self._leaf_first[group] and node.below[group]:
            return  # queued when its last child with a unit goes
        heap = self._heaps[group]
        if len(heap) > 64 + 2 * len(self._holders[group]):
            self._compact(group)  # every use of a page adds an entry, and only eviction pops stale ones
        self._order += 1
        heapq.heappush(heap, (self._rank(node, group), self._order, node))

    def _rank(self, node: Node, group: int) -> EvictionRank:
        """Return the sort key; the lowest is evicted first. A spare snapshot does not lower the rank of its page."""
        spare = (node.spare and self._atomic[group]) or bool(node.passed >> group & 1)
        value = node.last_use if self.eviction is None else self.eviction.value(node, group)
        return node.pins > 0, not spare, value

    def _compact(self, group: int) -> None:
        """Rebuild the heap with one entry per node that has a unit. In place, because `evict` holds a reference."""
        heap = self._heaps[group]
        nodes = {id(entry[2]): entry[2] for entry in heap if entry[2].units[group] != ABSENT}
        first = self._order + 1
        self._order += len(nodes)
        heap[:] = [(self._rank(n, group), first + i, n) for i, n in enumerate(nodes.values())]
        heapq.heapify(heap)

    def evict(self, group: int, is_idle: Callable[[int], bool]) -> tuple[bytes, int]:
        """Detach the idle unit of the lowest rank. Returns its node's key and the unit, ABSENT if there is none."""
        heap = self._heaps[group]
        while heap:
            rank, _, node = heapq.heappop(heap)
            unit = node.units[group]
            if unit == ABSENT or not is_idle(unit) or (self._leaf_first[group] and node.below[group]):
                continue  # stale entry: the node was used or evicted, or has a child, since it was queued
            if rank != self._rank(node, group):
                self.mark_evictable(node, group)
                continue
            if self.eviction is not None:
                self.eviction.evicted(group, rank[2])
            self._detach(node, group)
            return node.key, unit
        return self._evict_inner(group, is_idle)

    def _evict_inner(self, group: int, is_idle: Callable[[int], bool]) -> tuple[bytes, int]:
        """Evict a parent when no idle leaf is left. A request that computed a page a second time can hold a child
        without its cached parent; pages below such a parent can't be matched until it is computed again."""
        idle = [node for unit, node in self._holders[group].items() if is_idle(unit)]
        if not idle:
            return b"", ABSENT
        node = min(idle, key=lambda n: self._rank(n, group))
        unit = node.units[group]
        self._detach(node, group)
        return node.key, unit

    def passed_by(self, node: Node, group: int) -> Iterator[Node]:
        """Yield the nearest ancestor with a unit of the group. Nothing if the path forks before it: then the ancestor
        is a prefix that several paths share."""
        above = node.parent
        while above is not None and above.parent is not None and len(above.children) == 1:
            if above.units[group] != ABSENT:
                yield above
                return
            above = above.parent

    def pin(self, node: Node, by: int) -> None:
        """Change the pin count of a node and its ancestors. Pinned prefixes are evicted last, but they are evicted."""
        step: Node | None = node
        while step is not None:
            step.pins = max(0, step.pins + by)
            step = step.parent

    def update_evictable(self, node: Node, is_idle: Callable[[int, int], bool]) -> None:
        """Queue a node's idle units again after its rank changed without a release, as pinning does."""
        for group, unit in enumerate(node.units):
            if unit != ABSENT and is_idle(group, unit):
                self.mark_evictable(node, group)

    def _detach(self, node: Node, group: int) -> None:
        parent = node.parent
        assert parent is not None
        self.num_changes += 1
        del self._holders[group][node.units[group]]
        node.units[group] = ABSENT
        parent.below[group] -= 1
        if self._leaf_first[group] and parent.units[group] != ABSENT and not parent.below[group]:
            self.mark_evictable(parent, group)
        while node.parent is not None and not node.children and all(unit == ABSENT for unit in node.units):
            del self._nodes[node.key]
            del node.parent.children[node.tokens]
            node = node.parent
        if node.parent is None and not node.children:
            self._roots.pop(node.key, None)

    def diverging_child(self, root: bytes, node: Node | None, tokens: bytes, width: int) -> int:
        """Return how many leading tokens the page `tokens` shares with a child of `node` (`width` bytes per token)."""
        start = node if node is not None else self._roots.get(root)
        best = 0
        for child in start.children.values() if start else ():
            pairs = zip(_chunks(tokens, width), _chunks(child.tokens, width), strict=False)
            same = 0
            for ours, theirs in pairs:
                if ours != theirs:
                    break
                same += 1
            best = max(best, same)
        return best

    def check(self) -> None:
        for key, node in self._nodes.items():
            parent = node.parent
            assert node.key == key and parent is not None and parent.children.get(node.tokens) is node
            assert parent.parent is None or self._nodes.get(parent.key) is parent, "a node's parent left the tree"
            assert node.depth == parent.depth + 1
            assert node.children or any(unit != ABSENT for unit in node.units), "a bare leaf was left behind"
            for group in range(self._num_groups):
                below = sum(child.units[group] != ABSENT for child in node.children.values())
                assert node.below[group] == below, f"below[{group}] is {node.below[group]}, counted {below}"
                unit = node.units[group]
                assert unit == ABSENT or self._holders[group].get(unit) is node, "a unit's holder is wrong"
        held = sum(len(holders) for holders in self._holders)
        assert held == sum(unit != ABSENT for node in self._nodes.values() for unit in node.units)


def _chunks(data: bytes, width: int) -> Iterator[bytes]:
    return (data[i : i + width] for i in range(0, len(data), width))
