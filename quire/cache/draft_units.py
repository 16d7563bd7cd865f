"""Reserves the cache units of a step's drafts, and releases those of rejected drafts.

Pages behind the last accepted token are released. Recurrent state cannot be cut: the plan copies it to a backup before
the step, and if a draft is rejected the backup becomes the live state, from which the accepted tokens are computed
again. The scheduler calls this for rows with drafts only.
"""

from __future__ import annotations

from quire.cache.index import CacheIndex
from quire.cache.lease import lease_of
from quire.types import Copy, CopyKind, PageWrite, Plan, Request


class DraftUnits:
    """Reserves and settles the units of drafts in one cache index."""

    def __init__(self, cache: CacheIndex):
        self._cache = cache

    def reserve(self, request: Request, end: int, count: int, margin: int, plan: Plan) -> int:
        """Extend the lease by up to `count` drafts after `end` tokens, leaving `margin` pages per group available.

        Returns how many drafts have room. None crosses a due snapshot, whose length must be certain.
        """
        cache, lease = self._cache, lease_of(request)
        count = cache.chunk_end(request, request.planned, end + count + 1) - 1 - end
        if any(cache.available(group) < 2 for group in cache.state):
            return 0  # a backup would take the last slot that a waiting request needs
        count = self.extend(request, end, count, margin, plan)
        if not count:
            return 0
        for group in cache.state:
            lease.backup[group] = cache.ledger.take(group)
            plan.copies.append(Copy(CopyKind.DEVICE, group, lease.units[group][0], lease.backup[group]))
        return count

    def extend(self, request: Request, end: int, count: int, margin: int, plan: Plan) -> int:
        """Extend the lease's pages by up to `count` tokens after `end`, leaving `margin` pages per group available.

        Returns how many tokens have room.
        """
        cache, lease = self._cache, lease_of(request)
        missing = max(
            -(-(end + count) // cache.page_tokens) - min((len(lease.units[g]) for g in cache.paged), default=0), 0
        )
        is_spare = all(cache.free_for(lease, group) >= missing + margin for group in cache.paged)
        if cache.paged and not (missing <= 0 or (is_spare and cache.reserve(request, end + count, plan))):
            count = min(count, -end % cache.page_tokens)  # as many as the last page has room for
        return max(count, 0)

    def settle(self, request: Request, rejected: int, fence: int) -> None:
        """Release the units of rejected drafts after step `fence`. The request's tokens are those that remain."""
        lease = lease_of(request)
        for group, slot in lease.backup.items():
            unused = slot
            if rejected:
                unused, lease.units[group][0] = lease.units[group][0], slot
                lease.has_moved = True
            self._cache.ledger.release_after(group, [unused], fence)
        lease.backup.clear()
        if rejected:
            self._cache.rollback(request, len(request.tokens), fence)

    def write_moved(self, request: Request, plan: Plan) -> None:
        """Tell the device which slots hold the live state of a request, if they changed since its last step."""
        lease = lease_of(request)
        if lease.has_moved:
            lease.has_moved = False
            for group in self._cache.state:
                plan.page_writes.append(PageWrite(group, request.row, 0, list(lease.units[group])))
