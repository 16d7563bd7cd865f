"""The table of open requests: queued, held for another request's prefix, or in a row of the device.

The scheduler decides which request moves. Each method here performs one move completely: row, cache units, queue and
status change together, so that no request is lost or in two places.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from quire.cache.index import CacheIndex
from quire.cache.lease import lease_of
from quire.engine.adapters.slots import AdapterSlots
from quire.engine.device_rows import RowPool
from quire.engine.outcome import end_delta
from quire.engine.policies import Order
from quire.engine.queue import HeldRequests, WaitQueue
from quire.types import Delta, FinishReason, Plan, Request, RowInit, Status

MAX_OVERTAKES = 64  # requests with an adapter that start before an older one that waits for a slot


class RequestTable:
    """All open requests, with their queue, held requests, running list and device rows."""

    def __init__(
        self, cache: CacheIndex, num_rows: int, order: Order, clock: Callable[[], float], adapters: AdapterSlots
    ):
        self.adapters = adapters
        self.requests: dict[str, Request] = {}  # every request that has not ended, by id
        self.waiting = WaitQueue(order)
        self.running: list[Request] = []  # RUNNING and DRAINING, in order
        self.rows = RowPool(num_rows)
        self.last_step = 0  # number of the last planned step; rows and units released now are free after its commit
        self.loading: dict[str, Request] = {}  # wait for blocks from a store
        self.without_slot: dict[str, Request] = {}  # WAITING or SWAPPED; wait for a slot of their adapters
        self._overtakes = 0  # requests with an adapter that started while another waited for a slot
        self._held = HeldRequests()
        self._cache = cache
        self._order = order
        self._clock = clock

    def add(self, request: Request) -> None:
        request.lease = self._cache.empty_lease(request)
        self.requests[request.id] = request
        self.waiting.push(request)

    def hold(self, request: Request, key: bytes) -> None:
        """Take a request off the queue until the page `key` of its prompt is cached or no longer being computed."""
        self.waiting.remove(request)
        self._held.put(key, request)

    def wait_for_slot(self, request: Request) -> bool:
        """Take a request, swapped out or not, off the queue until its adapter can have a slot. False if it can now.

        After `MAX_OVERTAKES` others have started, no adapter gets a further request before a slot was free, so that
        adapters in constant use do not starve the one that waits.
        """
        if request.adapter is None:
            return False
        if self.adapters.has_room(request.adapter) and (not self.without_slot or self._overtakes < MAX_OVERTAKES):
            self._overtakes += bool(self.without_slot)
            return False
        self.waiting.remove(request)
        self.without_slot[request.id] = request
        return True

    def ask_for_slots(self) -> None:
        """Return the requests that wait for a slot to the queue."""
        for waiting in self.without_slot.values():
            self.waiting.push(waiting)
        self.without_slot.clear()
        self._overtakes = 0

    def wake(self, keys: Sequence[bytes]) -> None:
        for request in self._held.take(keys):
            request.status = Status.WAITING
            self.waiting.push(request)

    def wait_for_load(self, request: Request) -> None:
        """Take a request off the queue until blocks of its prefix are in host memory."""
        self.waiting.remove(request)
        request.status = Status.LOADING
        self.loading[request.id] = request

    def loaded(self, requests: Sequence[Request]) -> None:
        """Return requests to the queue whose blocks have come, or will not."""
        for request in requests:
            if self.loading.pop(request.id, None) is not None:
                request.status = Status.WAITING
                self.waiting.push(request)

    def start(self, request: Request, plan: Plan) -> None:
        """Move a request from the queue into a row, and add its `RowInit` and page tables to the plan."""
        self.waiting.remove(request)
        request.row = self.rows.take()
        request.planned = request.computed
        request.status = Status.RUNNING
        if not request.admitted_at:
            request.admitted_at = self._clock()
            request.cached_len = min(request.computed, request.prompt_len)
        insort(self.running, request, key=self._order)
        plan.added.append(
            RowInit(
                request.id,
                request.row,
                lease_of(request).pack(request.tokens)[:],
                request.prompt_len,
                request.computed,
                request.params,
                tuple(request.stop_ids),
                request.seed,
                request.sample_index,
                self.adapters.take(request.adapter, plan),
            )
        )
        self._cache.write_tables(request, plan)

    def leave_row(self, request: Request) -> None:
        if request.row >= 0:
            self.running.remove(request)
            if self.adapters.release(request.adapter):
                self.ask_for_slots()
            self.rows.release_after(request.row, self.last_step, self._cache.settled)
            request.row = -1

    def drop_state(self, request: Request) -> None:
        """Release the state of a request. Its full pages stay in the prefix tree until they are evicted."""
        self.wake(self._cache.release(request, self.last_step))
        request.status = Status.WAITING
        request.computed = request.planned = request.pending = request.inflight = 0
        request.num_drafts = request.num_proposals = request.num_replayed = 0

    def restart(self, request: Request) -> None:
        """Drop what a request has computed and return it to the queue. Only while it is in no step in flight."""
        if request.row < 0 and request.status is not Status.SWAPPED:
            return  # it has computed nothing
        assert not request.inflight
        self.waiting.remove(request)
        self.without_slot.pop(request.id, None)
        self.leave_row(request)
        self.drop_state(request)
        self.waiting.push(request)

    def rename_prefixes(self) -> None:
        """Give the prefixes of all requests that hold nothing the names of the present weights."""
        self.wake(list(self._held.keys()))
        for request in [*self.waiting, *self.without_slot.values()]:
            if request.status is Status.WAITING:
                request.lease = self._cache.empty_lease(request)

    def end(self, request: Request, reason: FinishReason) -> Delta:
        """End a request in any status and release what it holds. Returns its final delta."""
        if request.status in (Status.WAITING, Status.SWAPPED):
            self.waiting.remove(request)
        self.loading.pop(request.id, None)
        self.without_slot.pop(request.id, None)
        self.release(request)
        return self.mark_ended(request, reason)

    def mark_ended(self, request: Request, reason: FinishReason) -> Delta:
        """Remove a request from the table and return its final delta. The caller must `release` it afterwards."""
        request.status = Status.ENDED
        del self.requests[request.id]
        return end_delta(request, reason, self._clock())

    def release(self, request: Request) -> None:
        """Release the row and the lease of a request."""
        self.leave_row(request)
        self.wake(self._cache.release(request, self.last_step))

    def settle(self, step: int) -> None:
        """Free the rows and units that waited for steps up to `step`, which have committed."""
        self._cache.settle(step)
        self.rows.settle(self._cache.settled)

    def reset(self, last_step: int) -> None:
        """Start with no request, treating all steps up to `last_step` as committed."""
        self.last_step = last_step + 1  # one more step may have been planned in part
        self.rows.announce_all()
        self.settle(self.last_step)

    def check(self) -> None:
        self._cache.check()
        self.waiting.check()
        held = list(self._held)
        places = {r.id for r in self.waiting} | {r.id for r in self.running} | {r.id for r in held}
        places |= set(self.loading) | set(self.without_slot)
        assert places == set(self.requests), f"requests in no place or in two: {places ^ set(self.requests)}"
        counts = len(self.waiting), len(self.running), len(held), len(self.loading), len(self.without_slot)
        assert sum(counts) == len(self.requests)
        assert all(r.status is Status.LOADING and r.row < 0 for r in self.loading.values())
        if self._cache.tiers is not None:
            self._cache.tiers.check(self.loading.values())
        self.rows.check([r.row for r in self.running])
        self.adapters.check(self.running)
        assert not self.without_slot or any(r.adapter for r in self.running), "nothing will free a slot"
        for request in self.running:
            assert 0 <= request.computed <= request.planned <= request.expected_len <= request.max_len
            assert request.inflight >= request.pending - request.num_drafts >= 0
            assert 0 <= request.num_replayed <= max(len(request.tokens) - 1 - request.planned, 0)
            assert request.num_drafts == 0 or request.inflight == 1, "a row with drafts is in one step in flight"
        for request in self.waiting:
            assert request.row < 0 and request.inflight == 0 and request.pending == 0
            assert request.status is Status.SWAPPED or lease_of(request).is_empty
