"""What a commit leaves to be done once its news are out: the cache's books of full pages, and of requests that ended.

A long prompt fills hundreds of pages in one step; whoever waits for its first token need not wait until each of them
has a name and a place in the prefix tree. The scheduler notes rows here as it commits them, and the loop has the books
kept within the same turn, before anything else is planned.
"""

from __future__ import annotations

from quire.cache.index import CacheIndex
from quire.engine.request_table import RequestTable
from quire.types import FinishReason, Request


class DeferredCommit:
    def __init__(self, cache: CacheIndex, table: RequestTable):
        self._cache = cache
        self._table = table
        self._added: list[tuple[Request, FinishReason | None]] = []
        self._step = 0  # the last one that was committed

    @property
    def pending(self) -> bool:
        return self._step > self._cache.settled

    def add(self, request: Request, reason: FinishReason | None) -> None:
        """More of it is computed, and for this reason, if there is one, that was all."""
        self._added.append((request, reason))

    def seal(self, step: int) -> None:
        """All rows of the step have been noted."""
        self._step = step

    def flush(self) -> None:
        """Full pages of those who ended are worth keeping for whoever comes next, unless they are bad."""
        noted, self._added = self._added, []
        commit, last_step, wake = self._cache.commit, self._table.last_step, self._table.wake
        for request, reason in noted:
            if reason is not FinishReason.ERROR and (arrived := commit(request, last_step)):
                wake(arrived)
            if reason is not None:
                self._table.release(request)
        self._table.settle(self._step)
