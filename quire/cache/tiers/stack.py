"""Moves blocks between host memory and the stores below it, for one `CacheIndex`.

Downwards: what enters the prefix tree is copied to host memory by the next plan and from there to every store by
threads, so that a restart finds it. Upwards: a request whose prefix goes on in a store waits, without a row, until the
blocks are in host memory, if loading them is faster than computing them. Only the engine's thread calls it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quire.cache.tiers.host import HostBlock, HostTier
from quire.cache.tiers.seam import BlockId, BlockTransfer, TierFault
from quire.cache.tiers.sessions import SessionFolder
from quire.cache.tiers.stored import HostUnits, StoredTier
from quire.cache.tree import ABSENT
from quire.types import Request

MAX_QUEUED = 8192  # blocks that wait to be copied to host memory
STORE_BYTES = 16 << 20  # bytes that one plan copies to host memory
MIN_GAIN = 0.95  # maximum time of a load, as a share of the time to compute the same tokens
LOAD_PATIENCE = 4.0  # a request computes instead once its load takes this many times the expected time
MIN_PATIENCE = 1.0  # minimum seconds before a request computes instead


@dataclass(slots=True)
class Staging:
    """A request that waits for blocks, and the references that keep the blocks that have arrived."""

    request: Request
    give_up_at: float
    missing: set[BlockId] = field(default_factory=set)
    held: list[tuple[int, HostBlock]] = field(default_factory=list)


class TierStack:
    def __init__(
        self,
        host: HostTier,
        stores: Sequence[StoredTier],
        memory: HostUnits,
        *,
        sessions: SessionFolder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`sessions`: where conversations are kept by name; None: none of the stores is a folder."""
        self.sessions = sessions
        self.host = host
        self.stores = list(stores)
        self.memory = memory
        self.num_refused = 0  # loads that computing was expected to beat
        self._clock = clock
        self._new: OrderedDict[BlockId, int] = OrderedDict()  # blocks that a store lacks, and their device units
        self._to_store: dict[BlockId, BlockId] = {}  # block on its way through host memory -> its links
        self._writing: dict[BlockId, tuple[HostBlock, int]] = {}  # the pinned block, and how many stores read it
        self._loading: dict[BlockId, list[Staging]] = {}
        self._staged: dict[str, Staging] = {}  # request id -> its blocks
        self._ready: list[Request] = []
        self._arrived: list[tuple[BlockId, int]] = []  # blocks that are in host memory once their transfer has ended

    # -- downwards ------------------------------------------------------------------------------------------------

    def keep(self, block: BlockId, unit: int) -> None:
        """Queue a block that has entered the tree, unless every store has it."""
        if not all(store.has(block) for store in self.stores):
            if len(self._new) >= MAX_QUEUED:
                self._new.popitem(last=False)
                self.host.stats.drops += 1
            self._new[block] = unit

    def keep_again(self, block: BlockId, unit: int) -> None:
        """Queue a block that was dropped on its way: from host memory, or from its device unit unless it is ABSENT."""
        if self.host.has(block):
            self._store_below(block)
        elif unit != ABSENT:
            self.keep(block, unit)

    def is_moving(self, block: BlockId) -> bool:
        """Whether a block is on its way to the stores."""
        moving = block in self._new or block in self._to_store or block in self._writing
        return moving or any(block == late for late, _ in self._arrived)

    @property
    def has_stores(self) -> bool:
        return bool(self._new)

    def start_stores(self, holds: Callable[[BlockId, int], bool], unit_bytes: Sequence[int]) -> None:
        """Start to copy queued blocks to host memory. `holds`: whether the tree still has a block in that unit."""
        left = STORE_BYTES
        while self._new and left > 0:
            block, unit = self._new.popitem(last=False)
            if self.host.has(block):
                self._store_below(block)
            elif holds(block, unit) and self.host.store(block, unit):
                self._to_store[block] = block
                left -= unit_bytes[block.group]

    def _store_below(self, block: BlockId) -> None:
        """Write a block that is in host memory to the stores that lack it."""
        wanting = [store for store in self.stores if not store.has(block)]
        if not wanting or block in self._writing:
            return
        held = self.host.hold([block])
        if not held:
            return
        count = sum(store.store(block, held[0][1].unit) for store in wanting)
        if count:
            self._writing[block] = (held[0][1], count)
        else:
            self.host.release(held)

    # -- upwards --------------------------------------------------------------------------------------------------

    def stage(
        self,
        request: Request,
        blocks: Sequence[BlockId],
        resident: Sequence[BlockId],
        compute_seconds: float | None,
    ) -> bool:
        """Start to load blocks for a request, if that is faster than `compute_seconds`. False: it need not wait.

        `resident`: blocks that are in host memory and must stay there until the request is admitted.
        """
        sources: list[tuple[BlockId, StoredTier]] = []
        for block in blocks:
            store = next((store for store in self.stores if store.has(block)), None)
            if store is not None and block not in self._loading:
                sources.append((block, store))
            elif store is None and block not in self._loading:
                return False
        needed: dict[str, int] = {}
        for block, store in sources:
            needed[store.name] = needed.get(store.name, 0) + store.unit_bytes(block.group)
        expected = max((store.seconds_for(needed.get(store.name, 0)) for store in self.stores), default=0.0)
        if compute_seconds is not None and expected > MIN_GAIN * compute_seconds:
            self.num_refused += 1
            return False
        patience = max(MIN_PATIENCE, LOAD_PATIENCE * expected)
        staging = Staging(request, self._clock() + patience, set(blocks), self.host.hold(resident))
        for block, store in sources:
            unit = self.host.expect(block)
            if unit == ABSENT:
                staging.missing.discard(block)
            elif store.load(block, unit):
                self._loading[block] = []
            else:
                self.host.arrive(block, ok=False)
                staging.missing.discard(block)
        staging.missing &= self._loading.keys()
        if not staging.missing:
            self.host.release(staging.held)
            return False
        for block in staging.missing:
            self._loading[block].append(staging)
        self._staged[request.id] = staging
        return True

    def is_staging(self, request: Request) -> bool:
        """Whether blocks that a request waits for are still being loaded."""
        staging = self._staged.get(request.id)
        return staging is not None and bool(staging.missing)

    def forget(self, request: Request) -> None:
        """Release what is kept for a request that was admitted or has ended. Loads under way go on."""
        staging = self._staged.pop(request.id, None)
        if staging is not None:
            self.host.release(staging.held)
            for block in staging.missing:
                self._loading[block].remove(staging)
            self._ready = [one for one in self._ready if one is not request]

    # -- both -----------------------------------------------------------------------------------------------------

    def poll(self) -> list[Request]:
        """Handle all transfers that have ended; return the requests that need not wait any longer."""
        for done in self.host.poll():
            block = self._to_store.pop(done.block, None) if not done.is_load else None
            if block is not None and done.ok:
                self._arrived.append((block, done.unit))
        late, self._arrived = self._arrived, []
        for block, unit in late:
            if self.memory.has_arrived(block.group, unit):
                self._store_below(block)
            else:
                self._arrived.append((block, unit))
        for store in self.stores:
            for done in store.poll():
                (self._loaded if done.is_load else self._stored)(done)
        now = self._clock()
        for staging in [one for one in self._staged.values() if one.missing and one.give_up_at < now]:
            for block in staging.missing:
                self._loading[block].remove(staging)
            staging.missing.clear()
            self._ready.append(staging.request)
        ready, self._ready = self._ready, []
        return ready

    def _stored(self, done: BlockTransfer) -> None:
        held, count = self._writing.pop(done.block)
        if count > 1:
            self._writing[done.block] = (held, count - 1)
        else:
            self.host.unpin(done.block.group, held)

    def _loaded(self, done: BlockTransfer) -> None:
        self.host.arrive(done.block, ok=done.ok)
        for staging in self._loading.pop(done.block):
            staging.missing.discard(done.block)
            staging.held += self.host.hold([done.block])
            if not staging.missing:
                self._ready.append(staging.request)

    def take_faults(self) -> list[TierFault]:
        return [fault for store in self.stores for fault in store.take_faults()]

    def stop(self) -> None:
        """Cancel all transfers and wait for those under way, because host memory is about to be used anew."""
        for store in self.stores:
            store.cancel_all()

    def close(self) -> None:
        """Write the queued blocks, and end the threads."""
        for store in self.stores:
            store.close()

    def check(self, waiting: Iterable[Request]) -> None:
        """Assert that requests wait only for blocks that are being loaded, and that no ended request keeps a block."""
        missing = {block for staging in self._staged.values() for block in staging.missing}
        assert missing <= self._loading.keys(), "a request waits for a block that nothing loads"
        assert {request.id for request in waiting} <= set(self._staged), "a request waits for nothing"
        assert set(self._loading) == self.host.expected, "a load has no unit, or a unit no load"
        for store in self.stores:
            store.check()
