"""Counts the references to all units of all groups, on the device and on the host.

A unit is free, referenced by leases, evictable (only the prefix tree references it), or pending-free until the step
that may still use it has committed. `CacheIndex` decides which lease gets which unit. `take` evicts from the tree when
no unit is free, so `available` counts free and evictable units.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.cache.lease import Lease
from quire.cache.match import CacheStats
from quire.cache.pool import Pool
from quire.cache.tiers.host import HostTier
from quire.cache.tiers.seam import BlockId
from quire.cache.tree import ABSENT, Node, PrefixTree
from quire.types.step_queue import StepQueue


class UnitLedger:
    """The pools of all groups, with the units that steps in flight still use."""

    def __init__(self, tree: PrefixTree, num_units: list[int], host: HostTier, stats: CacheStats):
        self.tree = tree
        self.stats = stats
        self.pools = [Pool(n) for n in num_units]
        self.host = host
        self.host_pools = host.pools
        self.settled = 0  # the last step known to have committed
        self._num_evictable = [0] * len(num_units)  # per group: units that only the tree references
        self._pending_free: StepQueue[tuple[bool, int, list[int]]] = StepQueue()  # on host, group, units

    def available(self, group: int) -> int:
        return self.pools[group].num_free + self._num_evictable[group]

    def take(self, group: int) -> int:
        """Return a unit with one reference, evicting if none is free. The caller has checked `available`."""
        pool = self.pools[group]
        if not pool.num_free:
            key, unit = self.tree.evict(group, lambda u: pool.refs(u) == 1)
            assert unit != ABSENT, "asked for more units than available() promised"
            self._num_evictable[group] -= 1
            self.stats.evicted_units += 1
            self.host.store(BlockId(key, group), unit)  # the next plan copies it before anything overwrites it
            pool.drop([unit])
        return pool.take()

    def take_all(self, group: int, count: int) -> list[int]:
        """Return `count` units in the order in which `take` returns them."""
        if count == 1:  # the usual case: a decode
            return [self.take(group)]
        units = self.pools[group].take_free(count)
        return units + [self.take(group) for _ in range(count - len(units))]

    def share_from_tree(self, group: int, units: list[int]) -> None:
        """Add a lease's reference to units that the tree references."""
        self._num_evictable[group] -= self.pools[group].share(units)

    def share_to_tree(self, nodes: list[Node], group: int, units: list[int]) -> None:
        """Add the tree's reference to a lease's units, one unit per node. A unit whose node already has one, because
        another request computed the same page, stays private to the lease."""
        both = zip(nodes, units, strict=True)
        new = [(node, unit) for node, unit in both if unit != ABSENT and node.units[group] == ABSENT]
        self.pools[group].share([unit for _, unit in new])
        self.tree.attach(group, new)

    def release_after(self, group: int, units: list[int], step: int, *, on_host: bool = False) -> None:
        """Drop one reference of each unit once `step` has committed."""
        if step <= self.settled and not self._pending_free:
            self.drop(group, units, on_host=on_host)
        else:
            self._pending_free.put((on_host, group, units), step)

    def drop(self, group: int, units: list[int], *, on_host: bool = False) -> None:
        """Drop one reference of each unit now."""
        if on_host:
            self.host_pools[group].drop(units)
        else:
            self._num_evictable[group] += self.tree.mark_unshared_evictable(group, self.pools[group].drop(units))

    def settle(self, step: int) -> None:
        """Free the pending units of all steps up to `step`, which have committed and whose copies are done."""
        self.settled = max(self.settled, step)
        for on_host, group, units in self._pending_free.take_committed(self.settled):
            self.drop(group, units, on_host=on_host)
        self.host.settle(self.settled)

    def num_unreachable(self) -> int:
        """Return how many units are neither free nor evictable. Without requests these units have leaked."""
        on_device = sum(pool.num_units - 1 - self.available(group) for group, pool in enumerate(self.pools))
        on_host = sum(pool.num_units - 1 - pool.num_free for pool in self.host_pools)
        return on_device + on_host - sum(1 for _ in self.host.blocks())

    def check(self, leases: Iterable[Lease]) -> None:
        """Assert that each unit has as many references as leases, tree and pending-free entries name it."""
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
            for group, slot in lease.backup.items():
                own(owners, group, slot)
            for snapshot in lease.snapshots:
                for group, slot in snapshot.slots.items():
                    own(owners, group, slot)
        for on_host, group, units in self._pending_free:
            for unit in units:
                own(host_owners if on_host else owners, group, unit)
        for block, unit in self.host.blocks():
            own(host_owners, block.group, unit)
        self.host.check(self.settled)
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
