"""When a request's recurrent state is worth a snapshot. `CacheIndex` asks while it plans; chunks end where one is due.

A snapshot is due at every interval, so that no hit is further away than that; at the end of the prompt, where the next
turn of a conversation goes on; and where the prompt left what others have computed: whoever comes third with the same
beginning starts there.
"""

from __future__ import annotations

from quire.cache.lease import lease_of
from quire.cache.match import Match
from quire.types import CacheSpec, Request


class SnapshotRule:
    def __init__(self, specs: list[CacheSpec]):
        """`specs`: those of the state groups; a hit needs a snapshot of each at the same length."""
        assert len({spec.snapshot_tokens for spec in specs}) == 1, "snapshot_tokens is one number per model"
        self._interval = specs[0].snapshot_tokens
        self._page_tokens = specs[0].page_tokens
        self._min_saved = max(self._interval // 16, self._page_tokens)  # tokens a snapshot at a fork saves

    def fork_point(self, match: Match) -> int:
        """Where what is matched ends, if it goes on in the tree far enough beyond the last snapshot."""
        return match.reach if match.reach - match.length >= self._min_saved else 0

    def next_due(self, request: Request, start: int) -> int:
        """The first length beyond `start` at which a snapshot is due."""
        due = (start // self._interval + 1) * self._interval
        return min([due, *(point for point in self._points(request) if point > start)])

    def is_due(self, request: Request, length: int) -> bool:
        if length % self._page_tokens:
            return False
        return length % self._interval == 0 or length in self._points(request)

    def _points(self, request: Request) -> tuple[int, int]:
        lease = lease_of(request)
        return (request.prompt_len - 1) // self._page_tokens * self._page_tokens, lease.fork_point
