"""Host memory: the swap space of preempted requests, and the tier of blocks that were evicted from the device.

Both move by copies of a plan. A block stored by a plan is visible once that step has committed, and its unit is not
reused while a step in flight may read it. A preempted request's pages come first: they evict blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul

from quire.cache.pool import Pool
from quire.cache.tiers.seam import BlockId, BlockTransfer, TierStats
from quire.cache.tree import ABSENT
from quire.types import Copy, CopyKind, Plan
from quire.types.step_queue import StepQueue


@dataclass(slots=True)
class HostBlock:
    """A block in host memory."""

    unit: int
    pins: int = 0  # copies and requests that need its bytes to stay
    is_dropped: bool = False  # no longer found; its unit is free once nothing pins it


class HostTier:
    """Implements `Tier` between the device and host memory.

    `num_units`: per group, including the scratch unit; None: there is no host memory. `unit_bytes`: per group.
    """

    name = "host"

    def __init__(self, num_units: Sequence[int] | None, unit_bytes: Sequence[int], *, keeps_blocks: bool = True):
        sizes = list(num_units or [2] * len(unit_bytes))
        self.has_units = num_units is not None and all(n > 1 for n in sizes)
        self.keeps_blocks = keeps_blocks and self.has_units
        self.pools = [Pool(max(2, n)) for n in sizes]
        self.stats = TierStats()
        self._unit_bytes = list(unit_bytes)
        self._blocks: list[OrderedDict[bytes, HostBlock]] = [OrderedDict() for _ in sizes]  # least recently used first
        self._num_pinned = [0] * len(sizes)
        self._arriving: dict[BlockId, HostBlock] = {}  # stored by a step that has not committed
        self._unplanned: list[BlockId] = []  # blocks in `_arriving` whose copies are in no plan yet
        self._storing: StepQueue[list[BlockId]] = StepQueue()
        self._loading: StepQueue[list[tuple[BlockId, HostBlock, int]]] = StepQueue()
        self._unplanned_loads: list[tuple[BlockId, HostBlock, int]] = []
        self._expected: dict[BlockId, int] = {}  # blocks that a tier below loads -> the unit of each
        self._dropped: list[tuple[int, HostBlock]] = []  # pinned blocks that are no longer found
        self._outs: list[Copy] = []  # the next plan begins with them
        self._done: list[BlockTransfer] = []
        self.favoured: Counter[BlockId] = Counter()  # of sessions: evicted last

    # -- the protocol ---------------------------------------------------------------------------------------------

    def has(self, block: BlockId) -> bool:
        return block.key in self._blocks[block.group]

    def load(self, block: BlockId, unit: int) -> bool:
        """Start to copy a block to a unit of the device. `take_loads` returns the copies."""
        held = self._blocks[block.group].get(block.key)
        if held is None:
            return False
        self.pin(block.group, held)
        self._blocks[block.group].move_to_end(block.key)
        self._unplanned_loads.append((block, held, unit))
        self.stats.hits += 1
        self.stats.loaded_bytes += self._unit_bytes[block.group]
        return True

    def store(self, block: BlockId, unit: int) -> bool:
        """Start to copy a block from a unit of the device, which the next plan may overwrite."""
        if not self.keeps_blocks:
            return False
        if block.key in self._blocks[block.group]:
            self._blocks[block.group].move_to_end(block.key)
            return True
        if block in self._arriving:
            return True
        target = self.take(block.group)
        if target == ABSENT:
            self.stats.drops += 1
            return False
        self._arriving[block] = HostBlock(target)
        self._unplanned.append(block)
        self._outs.append(Copy(CopyKind.OUT, block.group, unit, target))
        self.stats.stores += 1
        self.stats.stored_bytes += self._unit_bytes[block.group]
        return True

    def poll(self) -> list[BlockTransfer]:
        done, self._done = self._done, []
        return done

    # -- units ----------------------------------------------------------------------------------------------------

    def num_takeable(self, group: int) -> int:
        """Return how many units `take` can return one after the other."""
        return self.pools[group].num_free + len(self._blocks[group]) - self._num_pinned[group]

    def take(self, group: int) -> int:
        """Return a unit with one reference, evicting a block if none is free; ABSENT if all are in use."""
        pool = self.pools[group]
        if not pool.num_free:
            victim = self._victim(group)
            if victim is None:
                return ABSENT
            self._drop(BlockId(victim, group))
            self.stats.evictions += 1
        return pool.take()

    def _victim(self, group: int) -> bytes | None:
        """Return the key of the least recently used block that nothing reads; one of a session only if all are."""
        blocks = self._blocks[group]
        for _ in range(len(blocks) if self.favoured else 0):
            key, held = next(iter(blocks.items()))
            if not held.pins and BlockId(key, group) not in self.favoured:
                return key
            blocks.move_to_end(key)  # so that a later search begins behind it
        return next((key for key, held in blocks.items() if not held.pins), None)

    def unit_of(self, block: BlockId) -> int:
        """Return the unit of a block; ABSENT if it is not in host memory."""
        held = self._blocks[block.group].get(block.key)
        return ABSENT if held is None else held.unit

    def pin(self, group: int, held: HostBlock) -> None:
        held.pins += 1
        self._num_pinned[group] += held.pins == 1 and not held.is_dropped

    def unpin(self, group: int, held: HostBlock) -> None:
        held.pins -= 1
        if held.pins:
            return
        if held.is_dropped:
            self._dropped.remove((group, held))
            self.pools[group].drop([held.unit])
        else:
            self._num_pinned[group] -= 1

    def hold(self, blocks: Sequence[BlockId]) -> list[tuple[int, HostBlock]]:
        """Keep blocks until `release`; returns what it takes. Blocks that are not there are left out."""
        held = [(b.group, self._blocks[b.group][b.key]) for b in blocks if b.key in self._blocks[b.group]]
        for group, block in held:
            self.pin(group, block)
        return held

    def release(self, held: Sequence[tuple[int, HostBlock]]) -> None:
        for group, block in held:
            self.unpin(group, block)

    def _drop(self, block: BlockId) -> None:
        """Forget a block; its unit is free once nothing pins it."""
        held = self._blocks[block.group].pop(block.key)
        if held.pins:
            held.is_dropped = True
            self._num_pinned[block.group] -= 1
            self._dropped.append((block.group, held))
        else:
            self.pools[block.group].drop([held.unit])

    # -- blocks that come from the tiers below ---------------------------------------------------------------------

    @property
    def expected(self) -> set[BlockId]:
        """The blocks that have a unit and are still being loaded."""
        return set(self._expected)

    def expect(self, block: BlockId) -> int:
        """Return a unit for a block that a tier below loads; ABSENT if there is no room."""
        unit = self.take(block.group)
        if unit != ABSENT:
            self._expected[block] = unit
        return unit

    def arrive(self, block: BlockId, *, ok: bool) -> None:
        """Make an expected block visible, or free its unit if the load failed."""
        unit = self._expected.pop(block)
        if ok and block.key not in self._blocks[block.group] and block not in self._arriving:
            self._blocks[block.group][block.key] = HostBlock(unit)
        else:
            self.pools[block.group].drop([unit])

    # -- plans ----------------------------------------------------------------------------------------------------

    def take_loads(self, plan: Plan) -> None:
        """Add the copies of the loads just started to the plan."""
        for block, held, unit in self._unplanned_loads:
            plan.copies.append(Copy(CopyKind.IN, block.group, held.unit, unit))
        if self._unplanned_loads:
            self._loading.put(self._unplanned_loads, plan.step)
            self._unplanned_loads = []

    @property
    def has_stores(self) -> bool:
        """Whether stores wait for a plan."""
        return bool(self._unplanned)

    def take_stores(self, plan: Plan) -> None:
        """Put the copies of the stores just started before all other copies of the plan, which may overwrite what
        they read."""
        if self._unplanned:
            plan.copies[:0] = self._outs
            self._storing.put(self._unplanned, plan.step)
            self._outs, self._unplanned = [], []

    def settle(self, step: int) -> None:
        """Make visible what steps up to `step` stored, and release what they read."""
        for blocks in self._storing.take_committed(step):
            for block in blocks:
                held = self._arriving.pop(block)
                self._blocks[block.group][block.key] = held
                self._done.append(BlockTransfer(block, held.unit, False, True))
        for loads in self._loading.take_committed(step):
            for block, held, unit in loads:
                self.unpin(block.group, held)
                self._done.append(BlockTransfer(block, unit, True, True))

    def abandon(self) -> None:
        """Forget what steps in flight were to store, and the blocks they read: these may be damaged."""
        for blocks in [*self._storing, self._unplanned]:
            for block in blocks:
                held = self._arriving.pop(block)
                self.pools[block.group].drop([held.unit])
                self._done.append(BlockTransfer(block, held.unit, False, False))
        self._storing.clear()
        self._unplanned, self._outs = [], []
        for loads in [*self._loading, self._unplanned_loads]:
            for block, held, unit in loads:
                if not held.is_dropped:
                    self._drop(block)
                    self.stats.failures += 1
                self.unpin(block.group, held)
                self._done.append(BlockTransfer(block, unit, True, False))
        self._loading.clear()
        self._unplanned_loads = []

    # -- integrity ------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._blocks))

    def measure(self) -> TierStats:
        """Return the counters, with what the tier holds now."""
        self.stats.num_blocks = self.num_blocks
        self.stats.num_bytes = sum(map(mul, map(len, self._blocks), self._unit_bytes))
        self.stats.queued = len(self._arriving) + len(self._expected)
        return self.stats

    def blocks(self) -> Iterator[tuple[BlockId, int]]:
        """Yield every block and its unit, also those not visible yet or any more."""
        for group, held_blocks in enumerate(self._blocks):
            for key, held in held_blocks.items():
                yield BlockId(key, group), held.unit
        for block, held in self._arriving.items():
            yield block, held.unit
        for group, held in self._dropped:
            yield BlockId(b"", group), held.unit
        yield from self._expected.items()

    def check(self, settled: int) -> None:
        """Assert that the counts of pins match, and that no transfer waits for a step that has committed."""
        self._storing.check(settled)
        self._loading.check(settled)
        planned = [block for blocks in self._storing for block in blocks] + self._unplanned
        assert sorted(planned) == sorted(self._arriving), "a block arrives by no copy, or by two"
        for group, held_blocks in enumerate(self._blocks):
            pinned = sum(held.pins > 0 for held in held_blocks.values())
            assert pinned == self._num_pinned[group], f"group {group}: {self._num_pinned[group]} pins, counted {pinned}"
            assert not any(held.is_dropped for held in held_blocks.values())
            assert not any(BlockId(key, group) in self._arriving for key in held_blocks), "a block is there twice"
        assert all(held.pins > 0 and held.is_dropped for _, held in self._dropped)
