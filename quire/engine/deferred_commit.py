"""The part of a commit that runs after its deltas are delivered: prefix tree inserts and releases of ended requests.

A long prompt fills hundreds of pages in one step, and its first token must not wait until each is hashed and inserted.
The scheduler adds rows as it commits them, and the loop flushes them in the same turn, before the next plan.
"""

from __future__ import annotations

from quire.cache.index import CacheIndex
from quire.engine.request_table import RequestTable
from quire.types import FinishReason, Request


class DeferredCommit:
    """Rows that a commit has added and whose cache updates are not done yet."""

    def __init__(self, cache: CacheIndex, table: RequestTable):
        self._cache = cache
        self._table = table
        self._added: list[tuple[Request, FinishReason | None]] = []
        self._step = 0  # the last committed step

    @property
    def pending(self) -> bool:
        """True if a committed step has not been flushed."""
        return self._step > self._cache.settled

    def add(self, request: Request, reason: FinishReason | None) -> None:
        """Add a request of the step being committed, with the reason if it has ended."""
        self._added.append((request, reason))

    def seal(self, step: int) -> None:
        """Mark the step complete: all its rows have been added."""
        self._step = step

    def flush(self) -> None:
        """Insert full pages into the prefix tree, release ended requests, and settle the step.

        Pages of a request that ended with an error are not inserted, since their state may be bad.
        """
        noted, self._added = self._added, []
        commit, last_step, wake = self._cache.commit, self._table.last_step, self._table.wake
        for request, reason in noted:
            if reason is not FinishReason.ERROR and (arrived := commit(request, last_step)):
                wake(arrived)
            if reason is not None:
                self._table.release(request)
        self._table.settle(self._step)
