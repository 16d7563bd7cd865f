"""Pages of sliding-window groups: reserved when a request is admitted, released when its window has passed them.

Pools of these groups are smaller than others (`memory.py`), because a window takes pages as it advances and releases
the pages it no longer covers; the prefix tree keeps those while there is room. Two rules follow:

- Admission reserves the pages of the request's window. Otherwise several requests would count on the same free pages.
- Pages that a window has passed are evicted first, except the last window before the end of the prompt and the one
  before its fork point: later prompts are likely to continue there.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.cache.lease import Lease, lease_of
from quire.cache.match import Match
from quire.cache.tree import ABSENT, PrefixTree
from quire.cache.unit_ledger import UnitLedger
from quire.types import CacheSpec, Request


class WindowPages:
    """Reservations and releases of pages in the sliding-window groups."""

    def __init__(self, specs: Sequence[CacheSpec], tree: PrefixTree, ledger: UnitLedger):
        self._tree = tree
        self._ledger = ledger
        self._page_tokens = specs[0].page_tokens
        self._window = {g: spec.window for g, spec in enumerate(specs) if spec.kind == "paged" and spec.window}
        self.groups = list(self._window)
        self._reserved: dict[Lease, dict[int, int]] = {}  # per lease and group: pages reserved and not taken yet
        self._totals = dict.fromkeys(self.groups, 0)

    # -- reserving ------------------------------------------------------------------------------------------------

    def max_pages(self, group: int) -> int:
        """Return the maximum number of pages a lease holds, excluding the pages of steps in flight."""
        return -(-self._window[group] // self._page_tokens) + 1

    def reserve(self, lease: Lease, group: int, num_missing: int) -> None:
        """Reserve the pages a lease still needs, at most as many as a window covers, less those it holds already."""
        held = sum(unit != ABSENT for unit in lease.units[group])
        count = max(0, min(num_missing, self.max_pages(group) - held))
        self._reserved.setdefault(lease, dict.fromkeys(self.groups, 0))[group] += count
        self._totals[group] += count

    def use_reserved(self, lease: Lease, group: int, count: int) -> None:
        """Reduce the lease's reservation by `count` pages taken; more than it reserved come from the common pool."""
        reserved = self._reserved.get(lease)
        if reserved is not None and group in reserved:
            used = min(count, reserved[group])
            reserved[group] -= used
            self._totals[group] -= used

    def release(self, lease: Lease) -> None:
        for group, count in self._reserved.pop(lease, {}).items():
            self._totals[group] -= count

    def reserved_for_others(self, lease: Lease, group: int) -> int:
        own = self._reserved.get(lease, {}).get(group, 0)
        return self._totals.get(group, 0) - own

    # -- pages passed ----------------------------------------------------------------------------------------------

    def mark_start(self, match: Match) -> None:
        """Keep the window that a hit starts from: other requests may start from it, too."""
        for group in self.groups:
            for node in match.nodes[self._first_visible(group, match.length) :]:
                node.passed &= ~(1 << group)

    def fork_point(self, match: Match) -> int:
        """Return the length at which the prompt leaves cached prefixes, even if the window there was evicted."""
        return match.reach if self.groups else 0

    def release_passed(self, request: Request, fence: int) -> None:
        """Release pages that no later token sees. Steps in flight may still read them, so only after step `fence`."""
        for group in self.groups:
            lease = lease_of(request)
            units = lease.units[group]
            for index in range(min(self._first_visible(group, request.computed), len(units)) - 1, -1, -1):
                if units[index] == ABSENT:
                    break
                node = self._tree.get(lease.keys[index]) if index < len(lease.keys) else None
                if node is not None and not self._is_start(request, group, index):
                    node.passed |= 1 << group
                self._ledger.release_after(group, [units[index]], fence)
                units[index] = ABSENT

    def _first_visible(self, group: int, length: int) -> int:
        """Return the index of the first page that the token at `length` sees."""
        return max(0, length - self._window[group] + 1) // self._page_tokens

    def _is_start(self, request: Request, group: int, index: int) -> bool:
        size = self._page_tokens
        points = ((request.prompt_len - 1) // size * size, lease_of(request).fork_point)
        return any(self._first_visible(group, point) <= index < point // size for point in points)

    def check(self, leases: set[Lease]) -> None:
        assert set(self._reserved) <= leases, "a lease without units has a reservation"
        for group in self.groups:
            counts = [reserved[group] for reserved in self._reserved.values()]
            assert sum(counts) == self._totals[group] and min(counts, default=0) >= 0, "the reservations do not add up"
