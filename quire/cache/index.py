"""Assigns the cache's units to requests: leases, the prefix tree and host swap space, for all groups of a model.

The scheduler calls it while it plans (`admit`, `reserve`, `snapshot`, `swap_out`, `swap_in`) and while it commits
(`commit`, `release`, `settle`). It moves no bytes: it appends copies to the plan, and the runtime executes them in plan
order. It imports no torch, so that it can be tested and simulated in milliseconds.

Methods with a `fence` release units once that step has committed, because steps in flight may still use them;
`UnitLedger` counts the units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.cache.chain import LINK_TOKENS, link_keys
from quire.cache.claims import Claims
from quire.cache.eviction import CostPerByte
from quire.cache.lease import Lease, Snapshot, lease_of
from quire.cache.match import CacheStats, Loads, Lookup, Match
from quire.cache.memory import unit_bytes
from quire.cache.pool import Pool
from quire.cache.snapshots import SnapshotRule
from quire.cache.tiers.host import HostTier
from quire.cache.tiers.seam import BlockId, TierFault, TierStats
from quire.cache.tiers.sessions import SessionFolder
from quire.cache.tiers.stack import TierStack
from quire.cache.tiers.stored import HostUnits, StoredTier
from quire.cache.tree import ABSENT, Node, PrefixTree
from quire.cache.unit_ledger import UnitLedger
from quire.cache.windows import WindowPages
from quire.types import CacheSpec, Copy, CopyKind, PageWrite, Plan, Request, Status


class CacheIndex:
    """The cache of one engine, as the scheduler sees it."""

    def __init__(
        self,
        specs: list[CacheSpec],
        num_units: list[int],
        num_host_units: list[int] | None = None,
        *,
        prefix_cache: bool = True,
        host_cache: bool = True,
        weights: bytes = b"",
    ):
        """`host_cache`: keep evicted blocks in host memory. `weights`: the version of the model's weights, by which all
        prefixes are named."""
        assert len({spec.page_tokens for spec in specs}) == 1, "page_tokens is one number per model"
        self.specs = specs
        self.page_tokens = specs[0].page_tokens
        self.prefix_cache = prefix_cache
        self.weights = weights
        self.stats = CacheStats()
        self.paged = [g for g, spec in enumerate(specs) if spec.kind == "paged"]
        self.state = [g for g, spec in enumerate(specs) if spec.kind == "state"]
        self._host_cache = host_cache
        self._unit_bytes = [unit_bytes(spec) for spec in specs]
        self.host = HostTier(num_host_units, self._unit_bytes, keeps_blocks=host_cache and prefix_cache)
        self.tiers: TierStack | None = None
        self.can_swap = self.host.has_units
        self._snapshots = SnapshotRule([specs[g] for g in self.state]) if self.state else None
        leaf_first = [spec.kind == "paged" and spec.window is None for spec in specs]
        self.tree = PrefixTree(len(specs), leaf_first, [spec.kind == "state" for spec in specs])
        self.ledger = UnitLedger(self.tree, num_units, self.host, self.stats)
        self._windows = WindowPages(specs, self.tree, self.ledger)
        self.windowed = self._windows.groups
        self._lookup = Lookup(specs, self.tree)
        self.available = self.ledger.available
        self._last_match: tuple[Lease, int, int, Match] | None = None  # lease, max. pages, tree.num_changes, match
        self._to_clear: list[Copy] = []
        self._leases: set[Lease] = set()  # leases with units, for check()
        self.claims = Claims(self.page_tokens)
        self.capacity_tokens = self._capacity_tokens()

    def empty_copy(self) -> CacheIndex:
        """Return an empty index of the same sizes. Units that await zeroing are zeroed by its first plan."""
        sizes = [pool.num_units for pool in self.pools]
        host = [pool.num_units for pool in self.host.pools] if self.can_swap else None
        new = CacheIndex(
            self.specs, sizes, host, prefix_cache=self.prefix_cache, host_cache=self._host_cache, weights=self.weights
        )
        new._to_clear = self._to_clear
        new.tree.eviction = self.tree.eviction
        if self.tiers is not None:
            self.tiers.stop()
            new.attach(self.tiers.stores, self.tiers.memory, self.tiers.sessions)
        return new

    def attach(self, stores: Sequence[StoredTier], memory: HostUnits, sessions: SessionFolder | None = None) -> None:
        """Put stores below host memory."""
        assert self.host.keeps_blocks and self.page_tokens % LINK_TOKENS == 0
        self.tiers = TierStack(self.host, stores, memory, sessions=sessions)

    def evict_by_cost(self, seconds: Callable[[int, int], float | None]) -> None:
        """Evict what is computed again fastest, per byte. `seconds(tokens, context)`: how long computing takes."""
        self.tree.eviction = CostPerByte(self.specs, self._unit_bytes, seconds)

    @property
    def stores(self) -> Sequence[StoredTier]:
        """The tiers below host memory."""
        return () if self.tiers is None else self.tiers.stores

    def empty_lease(self, request: Request) -> Lease:
        """Return the lease of a request that holds nothing yet."""
        return Lease.of(request, self.weights, self.page_tokens, len(self.specs))

    # -- queries --------------------------------------------------------------------------------------------------

    @property
    def pools(self) -> list[Pool]:
        return self.ledger.pools

    @property
    def settled(self) -> int:
        """The last step known to have committed."""
        return self.ledger.settled

    def reservable(self, request: Request) -> int:
        """Return for how many tokens this request could have pages if it took all that are available now."""
        lease = lease_of(request)
        pages = min((len(lease.units[g]) + self.free_for(lease, g) for g in self.paged), default=1 << 40)
        return pages * self.page_tokens

    def match(self, request: Request, limit: int | None = None) -> Match:
        """Return the longest cached prefix of this request, at most `limit` tokens (default: all but the last)."""
        lease = lease_of(request)
        last = len(request.tokens) - 1 if limit is None else limit
        max_pages = last // self.page_tokens
        if not self._may_share(request) or max_pages == 0:
            return Match()
        last_match, changes = self._last_match, self.tree.num_changes
        if last_match is not None and last_match[0] is lease and last_match[1:3] == (max_pages, changes):
            return last_match[3]  # the scheduler matches once to check for claims and again to admit
        lease.extend_keys(request.tokens, max_pages, self.tree)  # all keys: admission claims every page
        match = self._lookup.longest(lease.keys[:max_pages])
        self._last_match = (lease, max_pages, changes, match)
        return match

    # -- planning -------------------------------------------------------------------------------------------------

    def admit(self, request: Request, plan: Plan, margin: int) -> bool:
        """Give a waiting request its cached prefix and units for all its tokens, leaving `margin` units available.

        Returns True and sets `request.computed` to the length of the cached prefix, or returns False and changes
        nothing.
        """
        lease = lease_of(request)
        found = self.match(request)
        match = self._with_host(request, found)
        source = self._fork_source(request, match)
        for group in self.paged:
            self._share_matched(lease, group, match)
        if not self._has_room(lease, len(request.tokens), margin, match.loads):
            self._unshare(lease)
            return False
        if match.nodes:
            self.tree.touch(reversed(match.nodes))
            match.nodes[-1].hits += 1
            match.nodes[-1].spare = False
        self._leases.add(lease)
        request.computed = match.length
        lease.num_inserted = match.num_on_device(self.paged, self.page_tokens)
        self._windows.mark_start(match)
        lease.fork_point = (self._snapshots or self._windows).fork_point(match)
        if match.loads:
            self._load(lease, match, plan)
        if self.tiers is not None:
            self.tiers.forget(request)
        for group in self.state:
            if match.loads.get(group):
                continue
            snapshot = match.nodes[-1].units[group] if match.nodes else ABSENT
            slot = self.ledger.take(group)
            lease.units[group] = [slot]
            if snapshot == ABSENT:
                plan.copies.append(Copy(CopyKind.ZERO, group, 0, slot))
            elif slot != snapshot:  # equal if `take` evicted the snapshot itself: its bytes are in place
                plan.copies.append(Copy(CopyKind.DEVICE, group, snapshot, slot))
        for group in self.paged:
            missing = self._num_missing(lease, group, request)
            if group in self.windowed:  # taken as the window advances
                self._windows.reserve(lease, group, missing)
            else:
                lease.units[group] += self.ledger.take_all(group, missing)
        if source is not None:
            self._copy_tail(request, source, plan)
        self.stats.lookup_tokens += len(request.tokens)
        self.stats.hit_tokens += request.computed
        self.stats.loaded_tokens += match.length - found.length
        if self._may_share(request):
            self.claims.announce(request)
        return True

    def reserve(self, request: Request, length: int, plan: Plan) -> bool:
        """Extend the lease to `length` tokens in all groups; returns False and changes nothing if one has no room."""
        lease = lease_of(request)
        need = -(-length // self.page_tokens)
        for group in self.paged:
            count = need - len(lease.units[group])
            # A decode may take a page reserved for others: admission left a margin of one page per running request.
            if count > (self.available(group) if count <= 1 else self.free_for(lease, group)):
                return False
        for group in self.paged:
            units = lease.units[group]
            first = len(units)
            if first < need:
                units += self.ledger.take_all(group, need - first)
                self._windows.use_reserved(lease, group, need - first)
                plan.page_writes.append(PageWrite(group, request.row, first, units[first:]))
        return True

    def write_tables(self, request: Request, plan: Plan) -> None:
        """Write the page tables of a request that got a row: all pages and slots of its lease."""
        lease = lease_of(request)
        lease.has_moved = False
        for group, units in enumerate(lease.units):
            if units:
                pages = [max(0, unit) for unit in units] if ABSENT in units else list(units)
                plan.page_writes.append(PageWrite(group, request.row, 0, pages))

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Return where a prefill chunk from `start` ends: at `end`, or before it where a snapshot is due."""
        return end if self._snapshots is None else min(end, self._snapshots.next_due(request, start))

    def snapshot(self, request: Request, length: int, plan: Plan) -> None:
        """Add a snapshot to the plan if one is due at `length` and a slot is available."""
        if self._snapshots is None or not self.prefix_cache or not self._snapshots.is_due(request, length):
            return
        if any(self.available(group) < 1 for group in self.state):
            return
        lease = lease_of(request)
        slots = {group: self.ledger.take(group) for group in self.state}
        for group, slot in slots.items():
            plan.snapshots.append(Copy(CopyKind.DEVICE, group, lease.units[group][0], slot))
        lease.snapshots.append(Snapshot(length, slots))

    def swap_out(self, request: Request, plan: Plan) -> bool:
        """Copy a victim's units to the host and release them; returns False and changes nothing without room there."""
        lease = lease_of(request)
        if not self.can_swap:
            return False
        num_pages = -(-request.computed // self.page_tokens)
        wanted = [units[:num_pages] if g in self.paged else units for g, units in enumerate(lease.units)]
        counts = [sum(unit != ABSENT for unit in units) for units in wanted]
        if any(count > self.host.num_takeable(group) for group, count in enumerate(counts)):
            return False
        host: list[list[int]] = []
        for group, units in enumerate(wanted):
            moved = []
            for unit in units:
                target = ABSENT if unit == ABSENT else self.host.take(group)
                moved.append(target)
                if unit != ABSENT:
                    plan.copies.append(Copy(CopyKind.OUT, group, unit, target))
                    self.stats.swapped_out += 1
            host.append(moved)
        num_inserted = lease.num_inserted
        self.release(request, plan.step)
        lease.host, lease.num_inserted = host, num_inserted
        self._leases.add(lease)
        return True

    def swap_in(self, request: Request, plan: Plan, margin: int) -> bool:
        """Restore a swapped-out request: share pages the tree still has, copy the others from the host.

        Returns False and changes nothing without room on the device.
        """
        lease = lease_of(request)
        match = self.match(request, limit=request.computed)
        if self.state:
            match = Match()  # the live state on the host is newer than any snapshot
        for group in self.paged:
            self._share_matched(lease, group, match)
        if not self._has_room(lease, len(request.tokens), margin):
            self._unshare(lease)
            return False
        num_matched = match.length // self.page_tokens
        for group, sources in enumerate(lease.host):
            kept = num_matched if group in self.paged else 0
            for index, source in enumerate(sources):
                if index >= kept:
                    unit = ABSENT if source == ABSENT else self.ledger.take(group)
                    lease.units[group].append(unit)
                    if source != ABSENT:
                        plan.copies.append(Copy(CopyKind.IN, group, source, unit))
                        self.stats.swapped_in += 1
        for group in self.windowed:
            self._windows.reserve(lease, group, self._num_missing(lease, group, request))
        self._drop_host(lease, plan.step)
        self._leases.add(lease)
        return True

    @property
    def has_stores(self) -> bool:
        """Whether blocks wait for a plan that copies them to the host."""
        return self.host.has_stores or (self.tiers is not None and self.tiers.has_stores)

    def finish(self, plan: Plan) -> None:
        """Complete a plan, which takes no further unit: blocks evicted for it are copied before all else."""
        if self.tiers is not None:
            self.tiers.start_stores(self._holds, self._unit_bytes)
        self.host.take_stores(plan)

    def poll(self) -> list[Request]:
        """Handle transfers between tiers that have ended; return the requests that waited for them."""
        return [] if self.tiers is None else self.tiers.poll()

    def stage(self, request: Request, seconds: Callable[[int, int], float | None]) -> bool:
        """Start to load what a store has of a request's prefix. True: the request must wait for it.

        `seconds(tokens, context)`: how long it takes to compute so many tokens after so many others.
        """
        lease = lease_of(request)
        if self.tiers is None or lease.was_staged or not self._may_share(request):
            return False
        lease.was_staged = True
        match = self._with_host(request, self.match(request))
        keys = lease.keys[: (len(request.tokens) - 1) // self.page_tokens]
        stores = self.tiers.stores

        def has(group: int, index: int) -> bool:
            block = self.block(request, group, index)
            return self.host.has(block) or any(store.has(block) for store in stores)

        longer = self._lookup.extend(keys, match, has)
        if longer is match:
            return False
        blocks = [self.block(request, group, index) for group, index in self._lookup.lacking(longer)]
        resident = [block for block in blocks if self.host.has(block)]
        below = [block for block in blocks if not self.host.has(block)]
        return self.tiers.stage(request, below, resident, seconds(longer.length - match.length, match.length))

    def tier_stats(self) -> list[tuple[str, TierStats]]:
        """Return the name and the counters of each tier below the device."""
        if not self.host.keeps_blocks:
            return []
        return [("host", self.host.measure()), *((store.name, store.measure()) for store in self.stores)]

    def take_faults(self) -> list[TierFault]:
        """Return the kinds of failures of stores that came for the first time since the last call."""
        return [] if self.tiers is None else self.tiers.take_faults()

    def blocks_of(self, request: Request, has: Callable[[BlockId, int], bool]) -> tuple[int, list[tuple[BlockId, int]]]:
        """Return how many tokens of a prefix can be had, and its blocks with their units on the device, or ABSENT.

        `has(block, unit)`: whether a block can be had. The whole request is looked at, its last page included.
        """
        lease = lease_of(request)
        lease.extend_keys(request.tokens, len(request.tokens) // self.page_tokens, self.tree)

        def unit_of(group: int, index: int) -> int:
            node = self.tree.get(lease.keys[index])
            return ABSENT if node is None else node.units[group]

        found: dict[tuple[int, int], bool] = {}

        def can_be_had(group: int, index: int) -> bool:
            place = (group, index)
            if place not in found:
                found[place] = has(self.block(request, group, index), unit_of(group, index))
            return found[place]

        num_pages, _ = self._lookup.longest_where(len(lease.keys), can_be_had)
        blocks = [(self.block(request, g, i), unit_of(g, i)) for g, i in self._lookup.needed(num_pages)]
        return num_pages * self.page_tokens, blocks

    def reach(self, request: Request) -> list[tuple[str, int]]:
        """Return how many tokens of a request's prefix each tier and those above it hold, the device first."""
        match = self.match(request)
        found = [("device", match.length)]
        if not self.host.keeps_blocks or not self._may_share(request):
            return found
        match = self._with_host(request, match)
        found.append(("host", match.length))
        keys = lease_of(request).keys[: (len(request.tokens) - 1) // self.page_tokens]
        above: list[Callable[[BlockId], bool]] = [self.host.has]
        for store in self.stores:
            above.append(store.has)
            match = self._lookup.extend(keys, match, lambda g, i: any(has(self.block(request, g, i)) for has in above))
            found.append((store.name, match.length))
        return found

    def abandon(self) -> None:
        """Forget what the copies of all steps in flight were to store, because they failed and will not commit."""
        self.host.abandon()

    def settle(self, step: int) -> None:
        """Free and make visible what waited for steps up to `step`, which have committed."""
        self.ledger.settle(step)

    # -- committing -----------------------------------------------------------------------------------------------

    def commit(self, request: Request, fence: int) -> list[bytes]:
        """Insert the request's full pages and snapshots up to `request.computed` into the tree.

        Returns the keys of completed claims, so that requests held for them can continue.
        """
        lease = request.lease
        assert isinstance(lease, Lease)  # not lease_of: the call would cost every row of every step
        full = request.computed // self.page_tokens
        arrived: list[bytes] = []
        if self.prefix_cache and full > lease.num_inserted:
            lease.extend_keys(request.tokens, full)
            if self.paged:
                self._insert_pages(request, lease.num_inserted, full)
            arrived = self.claims.complete(request, lease.keys[lease.num_inserted : full])
            lease.num_inserted = full
        while lease.snapshots and lease.snapshots[0].length <= request.computed:
            self._insert_snapshot(request, lease.snapshots.pop(0))
        self._windows.release_passed(request, fence)
        if lease.claims_tail:
            arrived += self.claims.complete_tail(request)
        return arrived

    def rollback(self, request: Request, length: int, fence: int) -> None:
        """Release pages and snapshots beyond `length` tokens, after rejected drafts or a dropped step."""
        lease = lease_of(request)
        keep = -(-length // self.page_tokens)
        for group in self.paged:
            self.ledger.release_after(group, _present(lease.units[group][keep:]), fence)
            del lease.units[group][keep:]
        for snapshot in [s for s in lease.snapshots if s.length > length]:
            lease.snapshots.remove(snapshot)
            self._release_snapshot(snapshot, fence)

    def scrub(self, request: Request) -> None:
        """Mark a request's unshared units to be zeroed before their next use, because its state is not finite. Masked
        attention does not help: the weight is zero, and zero times NaN is NaN."""
        for group, units in enumerate(lease_of(request).units):
            own = [unit for unit in units if unit != ABSENT and self.pools[group].refs(unit) == 1]
            self._to_clear += [Copy(CopyKind.ZERO, group, 0, unit) for unit in own]

    def clear_scrubbed(self, plan: Plan) -> None:
        """Add the zeroing of scrubbed units to the plan; it must precede the plan's other copies."""
        plan.copies += self._to_clear
        self._to_clear = []

    def release(self, request: Request, fence: int) -> list[bytes]:
        """Release all of a request's units after step `fence`. Returns the keys of its withdrawn claims."""
        lease = lease_of(request)
        for group, units in enumerate(lease.units):
            self.ledger.release_after(group, _present(units), fence)
            units.clear()
        for group, slot in lease.backup.items():
            self.ledger.release_after(group, [slot], fence)
        lease.backup.clear()
        for snapshot in lease.snapshots:
            self._release_snapshot(snapshot, fence)
        lease.snapshots.clear()
        self._drop_host(lease, fence)
        if self.tiers is not None:
            self.tiers.forget(request)
        lease.num_inserted = 0
        self._windows.release(lease)
        self._leases.discard(lease)
        return self.claims.withdraw(request)

    def check(self) -> None:
        """Assert that reference counts and reservations match the leases. Called by tests and when idle."""
        self.ledger.check(self._leases)
        self._windows.check(self._leases)

    # -- internal -------------------------------------------------------------------------------------------------

    def _capacity_tokens(self) -> int:
        """Return the longest sequence that fits when it runs alone."""
        units = [self.pools[g].num_units - 1 for g in self.paged if g not in self.windowed]
        return min(units) * self.page_tokens if units else 1 << 62

    def block(self, request: Request, group: int, index: int) -> BlockId:
        """Return the id of what a group has at a page of a request, with the links that the page covers."""
        lease = lease_of(request)
        key = lease.keys[index]
        if group in self.state or self.page_tokens == LINK_TOKENS:
            return BlockId(key, group, (key,))
        parent = lease.keys[index - 1] if index else lease.root
        return BlockId(key, group, tuple(link_keys(parent, lease.pages(request.tokens, index, index + 1)[0])))

    def _keep(self, request: Request, group: int, units: list[tuple[int, int]]) -> None:
        """Let the stores keep blocks that have entered the tree: page indices and units.

        A request that goes on after the weights were replaced has prefixes named by the old ones. A restart with these
        must not find what the new ones computed.
        """
        assert self.tiers is not None
        if lease_of(request).root != self.empty_lease(request).root:
            return
        for index, unit in units:
            block = self.block(request, group, index)
            if unit != ABSENT and self._holds(block, unit):
                self.tiers.keep(block, unit)

    def _holds(self, block: BlockId, unit: int) -> bool:
        node = self.tree.get(block.key)
        return node is not None and node.units[block.group] == unit

    def _with_host(self, request: Request, match: Match) -> Match:
        """Extend a match by what host memory has."""
        if not self.host.num_blocks or not self._may_share(request):
            return match
        max_pages = (len(request.tokens) - 1) // self.page_tokens
        return self._lookup.with_host(lease_of(request).keys[:max_pages], match, self.host)

    def _load(self, lease: Lease, match: Match, plan: Plan) -> None:
        """Take units for what the device lacks of a match, and add copies from host memory to the plan."""
        wanted = [(BlockId(lease.keys[i], group), i) for group, loads in match.loads.items() for i in loads]
        held = self.host.hold([block for block, _ in wanted])  # taking units may evict other blocks
        for block, index in wanted:
            unit = self.ledger.take(block.group)
            if block.group in self.paged:
                lease.units[block.group][index] = unit
            else:
                lease.units[block.group] = [unit]
            self.host.load(block, unit)
        self.host.release(held)
        self.host.take_loads(plan)

    def _share_matched(self, lease: Lease, group: int, match: Match) -> None:
        """Reference the matched pages in the lease, except pages that a window no longer covers."""
        first = 0
        if group in self.windowed:
            first = max(0, match.length - (self.specs[group].window or 0) + 1) // self.page_tokens
        if match.loads:  # ABSENT stands for the pages to load
            loads, num_pages = match.loads.get(group, {}), match.length // self.page_tokens
            units = [ABSENT] * min(first, num_pages)
            units += [ABSENT if i in loads else match.nodes[i].units[group] for i in range(first, num_pages)]
        else:
            units = [ABSENT] * min(first, len(match.nodes)) + [node.units[group] for node in match.nodes[first:]]
        self.ledger.share_from_tree(group, _present(units))
        lease.units[group] += units

    def _unshare(self, lease: Lease) -> None:
        for group in self.paged:
            self.ledger.drop(group, _present(lease.units[group]))
            lease.units[group].clear()

    def _has_room(self, lease: Lease, num_tokens: int, margin: int, loads: Loads | None = None) -> bool:
        need = -(-num_tokens // self.page_tokens)
        for group in self.paged:
            wanted = need - len(lease.units[group]) + len(loads.get(group, ()) if loads else ())
            if group in self.windowed:  # a window releases older pages during prefill
                wanted = min(wanted, self._windows.max_pages(group))
            if wanted + margin > self.free_for(lease, group):
                return False
        return all(self.available(group) >= 1 for group in self.state)

    def free_for(self, lease: Lease, group: int) -> int:
        """Return how many units of a group this lease may take."""
        return self.available(group) - self._windows.reserved_for_others(lease, group)

    def _release_snapshot(self, snapshot: Snapshot, fence: int) -> None:
        for group, slot in snapshot.slots.items():
            self.ledger.release_after(group, [slot], fence)

    def _drop_host(self, lease: Lease, fence: int) -> None:
        for group, units in enumerate(lease.host):
            self.ledger.release_after(group, _present(units), fence, on_host=True)
        lease.host = []

    def _may_share(self, request: Request) -> bool:
        """Whether a request may use cached prefixes. Prompt logprobs and embeddings need every position computed."""
        return self.prefix_cache and not request.params.needs_whole_prompt

    def _num_missing(self, lease: Lease, group: int, request: Request) -> int:
        return max(0, -(-len(request.tokens) // self.page_tokens) - len(lease.units[group]))

    def _fork_source(self, request: Request, match: Match) -> Request | None:
        """Return a running request with the same prompt whose last, partly filled page can be copied."""
        tail = self.claims.tail_start(request)
        if self.state or not self._may_share(request) or len(request.tokens) != request.prompt_len:
            return None
        if match.length != tail or request.prompt_len - 1 == tail:
            return None
        owner = self.claims.tail_owner(request)
        if owner is None or owner.status is not Status.RUNNING or owner.computed < request.prompt_len - 1:
            return None
        still_there = all(lease_of(owner).units[g][tail // self.page_tokens] != ABSENT for g in self.paged)
        return owner if still_there else None

    def _copy_tail(self, request: Request, source: Request, plan: Plan) -> None:
        """Copy the page that both requests would write to; the pages before it are shared."""
        index = self.claims.tail_start(request) // self.page_tokens
        lease = lease_of(request)
        for group in self.paged:
            units = lease.units[group]
            if len(units) == index:
                units.append(self.ledger.take(group))
            plan.copies.append(Copy(CopyKind.DEVICE, group, lease_of(source).units[group][index], units[index]))
        request.computed = request.prompt_len - 1
        self.stats.copied_on_write += 1

    def _insert_pages(self, request: Request, first: int, last: int) -> None:
        """Insert pages into the tree. A page that every window has passed gets a node without units."""
        lease = lease_of(request)
        nodes = self._nodes(request, first, last)
        for group in self.paged:
            units = lease.units[group][first:last]
            self.ledger.share_to_tree(nodes, group, units)
            if self.tiers is not None:
                self._keep(request, group, list(enumerate(units, start=first)))

    def _insert_snapshot(self, request: Request, snapshot: Snapshot) -> None:
        depth = snapshot.length // self.page_tokens
        (node,) = self._nodes(request, depth - 1, depth)
        for group, slot in snapshot.slots.items():
            self.ledger.share_to_tree([node], group, [slot])
            self.ledger.drop(group, [slot])
            if self.tiers is not None:
                self._keep(request, group, [(depth - 1, slot)])
        for passed in self.tree.passed_by(node, self.state[0]):
            passed.spare = True
            self.tree.update_evictable(passed, lambda group, unit: self.pools[group].refs(unit) == 1)

    def _nodes(self, request: Request, first: int, last: int) -> list[Node]:
        """Return the tree's nodes of pages `first` to `last` (exclusive), created where missing."""
        lease = lease_of(request)
        lease.extend_keys(request.tokens, last)
        return self.tree.ensure(lease.root, lease.keys, first, last, lambda i, j: lease.pages(request.tokens, i, j))


def _present(units: list[int]) -> list[int]:
    """Return a copy without the pages that a window has passed."""
    return [unit for unit in units if unit != ABSENT] if ABSENT in units else list(units)
