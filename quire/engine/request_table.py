"""Where every request is: in the queue, held for another's prompt, or in a row of the device; and the moves between.

The scheduler decides who moves. Here a move is done as a whole: row, cache, queue and status change together, so that
whatever is decided, nobody is lost, doubled, or in two places.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from quire.cache.index import CacheIndex
from quire.cache.lease import Lease, lease_of
from quire.engine.device_rows import RowPool
from quire.engine.outcome import end_delta
from quire.engine.policies import Order
from quire.engine.queue import HeldRequests, WaitQueue
from quire.types import Delta, FinishReason, Plan, Request, RowInit, Status


class RequestTable:
    def __init__(self, cache: CacheIndex, num_rows: int, order: Order, clock: Callable[[], float]):
        self.requests: dict[str, Request] = {}  # every request that has not ended
        self.waiting = WaitQueue(order)
        self.running: list[Request] = []  # RUNNING and DRAINING, in order
        self.rows = RowPool(num_rows)
        self.last_step = 0  # that was planned: what is given back is free once it has committed
        self._held = HeldRequests()
        self._cache = cache
        self._order = order
        self._clock = clock

    def add(self, request: Request) -> None:
        request.lease = Lease.empty(request.salt, self._cache.page_tokens, len(self._cache.specs))
        self.requests[request.id] = request
        self.waiting.push(request)

    def hold(self, request: Request, key: bytes) -> None:
        """Out of the queue until this page of its prompt is there, or nobody computes it any more."""
        self.waiting.remove(request)
        self._held.put(key, request)

    def wake(self, keys: Sequence[bytes]) -> None:
        for request in self._held.take(keys):
            request.status = Status.WAITING
            self.waiting.push(request)

    def start(self, request: Request, plan: Plan) -> None:
        """From the queue into a row; the device is told everything about it."""
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
            )
        )
        self._cache.write_tables(request, plan)

    def leave_row(self, request: Request) -> None:
        if request.row >= 0:
            self.running.remove(request)
            self.rows.release_after(request.row, self.last_step, self._cache.settled)
            request.row = -1

    def drop_state(self, request: Request) -> None:
        """Back to the start: its pages stay in the prefix tree as long as nobody needs their room."""
        self.wake(self._cache.release(request, self.last_step))
        request.status = Status.WAITING
        request.computed = request.planned = request.pending = request.inflight = 0

    def end(self, request: Request, reason: FinishReason) -> Delta:
        """Gone, from wherever it is. The delta says what it took."""
        if request.status in (Status.WAITING, Status.SWAPPED):
            self.waiting.remove(request)
        self.release(request)
        return self.mark_ended(request, reason)

    def mark_ended(self, request: Request, reason: FinishReason) -> Delta:
        """Off the list of those who have not ended; whoever does this to one that runs clears it away afterwards."""
        request.status = Status.ENDED
        del self.requests[request.id]
        return end_delta(request, reason, self._clock())

    def release(self, request: Request) -> None:
        """Its row and all that it holds go back."""
        self.leave_row(request)
        self.wake(self._cache.release(request, self.last_step))

    def settle(self, step: int) -> None:
        """Every step up to this one has committed: rows and units that waited for it are free."""
        self._cache.settle(step)
        self.rows.settle(self._cache.settled)

    def reset(self, last_step: int) -> None:
        """Nothing runs, and whatever was planned up to this step counts as committed."""
        self.last_step = last_step + 1  # one more may have been in the making
        self.rows.announce_all()
        self.settle(self.last_step)

    def check(self) -> None:
        self._cache.check()
        self.waiting.check()
        held = list(self._held)
        places = {r.id for r in self.waiting} | {r.id for r in self.running} | {r.id for r in held}
        assert places == set(self.requests), f"lost or doubled: {places ^ set(self.requests)}"
        assert len(self.waiting) + len(self.running) + len(held) == len(self.requests)
        self.rows.check([r.row for r in self.running])
        for request in self.running:
            assert 0 <= request.computed <= request.planned <= request.expected_len <= request.max_len
            assert request.inflight >= request.pending >= 0
        for request in self.waiting:
            assert request.row < 0 and request.inflight == 0 and request.pending == 0
            assert request.status is Status.SWAPPED or lease_of(request).is_empty
