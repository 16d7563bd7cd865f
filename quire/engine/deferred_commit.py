"""What a commit leaves to be done once its news are out: the cache's books of full pages, and of requests that ended.

A long prompt fills hundreds of pages in one step; whoever waits for its first token need not wait until each of them
has a name and a place in the prefix tree. The scheduler notes rows here as it commits them, and the loop has the books
kept within the same turn, before anything else is planned.
"""

from __future__ import annotations

from quire.cache.index import CacheIndex
from quire.engine.request_table import Roster
from quire.types import FinishReason, Request


class Books:
    def __init__(self, cache: CacheIndex, roster: Roster):
        self._cache = cache
        self._roster = roster
        self._noted: list[tuple[Request, FinishReason | None]] = []
        self._step = 0  # the last one that was committed

    @property
    def are_open(self) -> bool:
        return self._step > self._cache.settled

    def note(self, request: Request, reason: FinishReason | None) -> None:
        """More of it is computed, and for this reason, if there is one, that was all."""
        self._noted.append((request, reason))

    def close_step(self, step: int) -> None:
        """All rows of the step have been noted."""
        self._step = step

    def keep(self) -> None:
        """Full pages of those who ended are worth keeping for whoever comes next, unless they are bad."""
        noted, self._noted = self._noted, []
        commit, last_step, wake = self._cache.commit, self._roster.last_step, self._roster.wake
        for request, reason in noted:
            if reason is not FinishReason.ERROR and (arrived := commit(request, last_step)):
                wake(arrived)
            if reason is not None:
                self._roster.clear_away(request)
        self._roster.settle(self._step)
