"""Decides at which lengths a step takes a snapshot of a request's recurrent state. Prefill chunks end there.

A snapshot is due at every interval, which bounds the tokens that a hit computes again; at the end of the prompt, from
which the next turn of a conversation continues; and at the fork point, where the prompt leaves the cached prefixes, so
that a third prompt with the same prefix starts there.
"""

from __future__ import annotations

from quire.cache.lease import lease_of
from quire.cache.match import Match
from quire.types import CacheSpec, Request


class SnapshotRule:
    """The lengths at which snapshots are due, for one model."""

    def __init__(self, specs: list[CacheSpec]):
        """`specs`: those of the state groups; a hit needs a snapshot of each group at the same length."""
        assert len({spec.snapshot_tokens for spec in specs}) == 1, "snapshot_tokens is one number per model"
        self._interval = specs[0].snapshot_tokens
        self._page_tokens = specs[0].page_tokens
        self._min_saved = max(self._interval // 16, self._page_tokens)  # tokens a snapshot at a fork point must save

    def fork_point(self, match: Match) -> int:
        """Return the length of the matched pages if they reach far enough beyond the last snapshot, otherwise 0."""
        return match.reach if match.reach - match.length >= self._min_saved else 0

    def next_due(self, request: Request, start: int) -> int:
        """Return the first length beyond `start` at which a snapshot is due."""
        due = (start // self._interval + 1) * self._interval
        return min([due, *(point for point in self._points(request) if point > start)])

    def is_due(self, request: Request, length: int) -> bool:
        if length % self._page_tokens:
            return False
        return length % self._interval == 0 or length in self._points(request)

    def _points(self, request: Request) -> tuple[int, int]:
        lease = lease_of(request)
        return (request.prompt_len - 1) // self._page_tokens * self._page_tokens, lease.fork_point
