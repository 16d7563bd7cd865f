"""The prefix tree: which page-aligned prefixes are in the cache, one tree for all groups of a model.

A node is one page of tokens behind one exact prefix, named by a chain of hashes over (parent, tokens, salt); for each
group it knows the unit that holds its bytes, or that it has none. `CacheIndex` inserts in commit, looks up at
admission, and evicts when a pool runs dry: least recently used first, leaves before their parents, pinned ones last.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

ABSENT = -1
EvictionRank = tuple[bool, bool, int]  # pinned, worth keeping, last use
KEY_BYTES = 20  # 160 bits: collisions are out of reach, also for someone who looks for them


def root_key(salt: bytes) -> bytes:
    return blake2b(b"quire/prefix/1" + salt, digest_size=KEY_BYTES).digest()


def page_key(parent: bytes, tokens: bytes) -> bytes:
    return blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


class Node:
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
    )

    def __init__(self, key: bytes, parent: Node | None, tokens: bytes, num_groups: int):
        self.key = key
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0  # pages up to and with this one
        self.tokens = tokens
        self.units = [ABSENT] * num_groups
        self.children: dict[bytes, Node] = {}  # by their tokens
        self.below = [0] * num_groups  # children that hold a unit of the group
        self.hits = 0
        self.pins = 0
        self.spare = False  # a snapshot with a later one on the same path, from which nobody has set out: goes first
        self.passed = 0  # a bit for each group whose window has passed this page, and nobody sets out there: go first
        self.last_use = 0


class PrefixTree:
    def __init__(self, num_groups: int, leaf_first: list[bool], atomic: list[bool]):
        """`leaf_first[g]`: in this group a page is of no use without all pages before it; `atomic[g]`: its units are
        snapshots, each of use without any other."""
        self._num_groups = num_groups
        self._leaf_first = leaf_first
        self._atomic = atomic
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self.get = self._nodes.get  # the node of a key, or None; a prompt asks for hundreds
        self.num_changes = 0  # of what is there, so that who looked before knows whether to look again
        self._clock = 0
        self._order = 0
        self._holders: list[dict[int, Node]] = [{} for _ in range(num_groups)]  # unit -> its node
        self._heaps: list[list[tuple[EvictionRank, int, Node]]] = [[] for _ in range(num_groups)]

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, key: bytes) -> Node | None:
        """The node of a key, which may be a root's."""
        return self._nodes.get(key) or self._roots.get(key)

    def nodes(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def ensure(
        self, root: bytes, keys: list[bytes], first: int, depth: int, pages: Callable[[int, int], list[bytes]]
    ) -> list[Node]:
        """The nodes of `keys[first:depth]`, made with whatever ancestors are missing; `pages(i, j)` are the bytes of
        pages i to j."""
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
        """Each node's bytes for `group` are in its unit from now on; the tree holds one reference to it."""
        self.num_changes += len(new)
        holders = self._holders[group]
        for node, unit in new:
            assert node.units[group] == ABSENT and node.parent is not None
            node.units[group] = unit
            node.passed &= ~(1 << group)
            node.parent.below[group] += 1
            holders[unit] = node

    def touch(self, nodes: Iterable[Node]) -> None:
        """Used now, the first of them least recently."""
        clock = self._clock
        for node in nodes:
            clock += 1
            node.last_use = clock
        self._clock = clock

    def mark_unshared_evictable(self, group: int, units: Iterable[int]) -> int:
        """These have one holder left. Where it is the tree they may be evicted when their turn comes; how many are."""
        holders = self._holders[group]
        nodes = [holders[unit] for unit in units if unit in holders]
        self.touch(nodes)
        for node in nodes:
            if not node.below[group] or not self._leaf_first[group]:
                self.mark_evictable(node, group)
        return len(nodes)

    def mark_evictable(self, node: Node, group: int) -> None:
        """Only the tree holds this unit now, so it may be evicted when its turn comes."""
        if self._leaf_first[group] and node.below[group]:
            return  # offered again when its last child goes
        heap = self._heaps[group]
        if len(heap) > 64 + 2 * len(self._holders[group]):
            self._compact(group)  # every use of a page offers it anew; without eviction nobody pops the old entries
        self._order += 1
        heapq.heappush(heap, (self._rank(node, group), self._order, node))

    def _rank(self, node: Node, group: int) -> EvictionRank:
        """The lowest goes first. A page is not less useful because a snapshot beside it is."""
        spare = (node.spare and self._atomic[group]) or bool(node.passed >> group & 1)
        return node.pins > 0, not spare, node.last_use

    def _compact(self, group: int) -> None:
        """One entry per node that still holds a unit. In place: `evict` may be holding the list."""
        heap = self._heaps[group]
        nodes = {id(entry[2]): entry[2] for entry in heap if entry[2].units[group] != ABSENT}
        first = self._order + 1
        self._order += len(nodes)
        heap[:] = [(self._rank(n, group), first + i, n) for i, n in enumerate(nodes.values())]
        heapq.heapify(heap)

    def evict(self, group: int, is_idle: Callable[[int], bool]) -> int:
        """Take the least useful idle unit of the group out of the tree; ABSENT when there is none."""
        heap = self._heaps[group]
        while heap:
            rank, _, node = heapq.heappop(heap)
            unit = node.units[group]
            if unit == ABSENT or not is_idle(unit) or (self._leaf_first[group] and node.below[group]):
                continue  # stale: it was used, evicted or grew a child since it was offered
            if rank != self._rank(node, group):
                self.mark_evictable(node, group)
                continue
            self._detach(node, group)
            return unit
        return self._evict_inner(group, is_idle)

    def _evict_inner(self, group: int, is_idle: Callable[[int], bool]) -> int:
        """No idle leaf is left. A request that computed a page twice can hold a child without its cached parent; such
        parents are the last to go, and what hangs below them can't be matched until they are computed again."""
        idle = [node for unit, node in self._holders[group].items() if is_idle(unit)]
        if not idle:
            return ABSENT
        node = min(idle, key=lambda n: self._rank(n, group))
        unit = node.units[group]
        self._detach(node, group)
        return unit

    def passed_by(self, node: Node, group: int) -> Iterator[Node]:
        """The nearest node above that holds a unit of the group, unless the path forks on the way: then what lies above
        is a beginning that others share."""
        above = node.parent
        while above is not None and above.parent is not None and len(above.children) == 1:
            if above.units[group] != ABSENT:
                yield above
                return
            above = above.parent

    def pin(self, node: Node, by: int) -> None:
        """Soft: pinned prefixes are evicted last, not never."""
        step: Node | None = node
        while step is not None:
            step.pins = max(0, step.pins + by)
            step = step.parent

    def update_evictable(self, node: Node, is_idle: Callable[[int, int], bool]) -> None:
        """A node's rank changed without a lease being released (pins): offer its idle units anew."""
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
        """How many tokens of the page `tokens` some cached page after `node` shares (`width` bytes a token)."""
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
