"""All units of all groups, on the device and on the host: which are free, which the prefix tree alone still holds, and
which are pending-free until the step that may use them has committed.

`CacheIndex` decides who gets what, this keeps the count. `take` evicts from the tree when nothing is free, so what is
`available` is what can really be had.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.cache.lease import Lease
from quire.cache.match import CacheStats
from quire.cache.pool import Pool
from quire.cache.tree import ABSENT, Node, PrefixTree
from quire.types.step_queue import StepQueue


class UnitLedger:
    def __init__(self, tree: PrefixTree, num_units: list[int], num_host_units: list[int] | None, stats: CacheStats):
        self.tree = tree
        self.stats = stats
        self.pools = [Pool(n) for n in num_units]
        self.host_pools = [Pool(max(2, n)) for n in num_host_units or [2] * len(num_units)]
        self.settled = 0  # the last step that is known to have committed
        self._num_evictable = [0] * len(num_units)  # units only the tree holds: free for the taking, once evicted
        self._pending_free: StepQueue[tuple[bool, int, list[int]]] = StepQueue()  # on host, group, units

    def available(self, group: int) -> int:
        return self.pools[group].num_free + self._num_evictable[group]

    def take(self, group: int) -> int:
        """A unit nobody else has; the caller asked `available` before."""
        pool = self.pools[group]
        if not pool.num_free:
            unit = self.tree.evict(group, lambda u: pool.refs(u) == 1)
            assert unit != ABSENT, "asked for more units than available() promised"
            self._num_evictable[group] -= 1
            self.stats.evicted_units += 1
            pool.drop([unit])
        return pool.take()

    def take_all(self, group: int, count: int) -> list[int]:
        """As many, in the order that `take` would have."""
        if count == 1:  # what a decode takes
            return [self.take(group)]
        units = self.pools[group].take_free(count)
        return units + [self.take(group) for _ in range(count - len(units))]

    def share_from_tree(self, group: int, units: list[int]) -> None:
        """A lease takes a share of what the tree holds."""
        self._num_evictable[group] -= self.pools[group].share(units)

    def share_to_tree(self, nodes: list[Node], group: int, units: list[int]) -> None:
        """The tree takes a share of what a lease holds, a unit a node. Had someone computed the same before, it stays
        private."""
        both = zip(nodes, units, strict=True)
        new = [(node, unit) for node, unit in both if unit != ABSENT and node.units[group] == ABSENT]
        self.pools[group].share([unit for _, unit in new])
        self.tree.attach(group, new)

    def release_after(self, group: int, units: list[int], step: int, *, on_host: bool = False) -> None:
        """One holder less of each, once `step` has committed."""
        if step <= self.settled and not self._pending_free:
            self.drop(group, units, on_host=on_host)
        else:
            self._pending_free.put((on_host, group, units), step)

    def drop(self, group: int, units: list[int], *, on_host: bool = False) -> None:
        """One holder less of each, now."""
        if on_host:
            self.host_pools[group].drop(units)
        else:
            self._num_evictable[group] += self.tree.mark_unshared_evictable(group, self.pools[group].drop(units))

    def settle(self, step: int) -> None:
        """Every step up to this one has committed and its copies are done: what waited for it is free."""
        self.settled = max(self.settled, step)
        for on_host, group, units in self._pending_free.take_committed(self.settled):
            self.drop(group, units, on_host=on_host)

    def num_unreachable(self) -> int:
        """Units that are neither free nor the prefix tree's alone: with no request left, they have leaked."""
        on_device = sum(pool.num_units - 1 - self.available(group) for group, pool in enumerate(self.pools))
        on_host = sum(pool.num_units - 1 - pool.num_free for pool in self.host_pools)
        return on_device + on_host

    def check(self, leases: Iterable[Lease]) -> None:
        """Every unit is free, or owned by leases, tree and pending-free exactly as often as it is referenced."""
        self.tree.check()
        groups = range(len(self.pools))
        owners: list[dict[int, int]] = [{} for _ in groups]
        host_owners: list[dict[int, int]] = [{} for _ in groups]

        def own(table: list[dict[int, int]], group: int, unit: int) -> None:
            if unit != ABSENT:
                table[group][unit] = table[group].get(unit, 0) + 1

        for lease in leases:
            for group in groups:
                for unit in lease.units[group]:
                    own(owners, group, unit)
                for unit in lease.host[group] if lease.host else ():
                    own(host_owners, group, unit)
            for snapshot in lease.snapshots:
                for group, slot in snapshot.slots.items():
                    own(owners, group, slot)
        for on_host, group, units in self._pending_free:
            for unit in units:
                own(host_owners if on_host else owners, group, unit)
        evictable = [0] * len(self.pools)
        for node in self.tree.nodes():
            for group, unit in enumerate(node.units):
                own(owners, group, unit)
                evictable[group] += unit != ABSENT and self.pools[group].refs(unit) == 1
        for group in groups:
            self.pools[group].check(owners[group])
            self.host_pools[group].check(host_owners[group])
            assert evictable[group] == self._num_evictable[group], f"group {group}: the count of evictable units is off"
        self._pending_free.check(self.settled)
