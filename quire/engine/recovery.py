"""Finds the request that makes steps fail, by bisection.

After a failed step all its requests are rolled back to committed state. `Bisection` then decides which requests may
run: a group that gets past the point of failure is cleared, one that fails again is halved, and a single suspect that
fails twice is the culprit. A request from a step that killed the process runs alone from the start. Between two such
isolated requests all others, including cleared ones, get a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping

from quire.cache.lease import lease_of
from quire.types import CopyKind, Plan, Request, Status


def affected_by(plans: list[Plan], requests: Iterable[Request]) -> list[Request]:
    """Return the requests with a row in these steps, with a step in flight, or being swapped out by one of them."""
    rows = {row.request_id for plan in plans for row in plan.rows}
    rows |= {row.request_id for plan in plans for row in plan.added}
    moved = {(copy.group, copy.target) for plan in plans for copy in plan.copies if copy.kind is CopyKind.OUT}

    def is_touched(request: Request) -> bool:
        if request.status is Status.SWAPPED:
            return any((group, unit) in moved for group, units in enumerate(lease_of(request).host) for unit in units)
        return request.row >= 0 and (request.id in rows or request.inflight > 0)

    return [request for request in requests if is_touched(request)]


class AllExcept:
    """The container of all names except the given ones."""

    def __init__(self, names: set[str]):
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name not in self._names


class Bisection:
    """The groups of suspects after failed steps, and which of them may run now."""

    def __init__(self) -> None:
        self._groups: deque[list[str]] = deque()
        self._isolated: set[str] = set()  # suspects in the end of an engine process
        self._is_others_turn = False
        self._targets: dict[str, int] = {}  # computed tokens at which each suspect is cleared
        self._failed_alone: set[str] = set()  # suspects that failed alone once, which may be a transient fault

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def active(self) -> bool:
        return bool(self._groups)

    @property
    def group(self) -> Container[str] | None:
        """The ids of the requests that may run now; None: all."""
        if self._is_others_turn:
            return AllExcept({suspect for group in self._groups for suspect in group})
        return set(self._groups[0]) if self._groups else None

    def isolate(self, suspect: str, target: int) -> None:
        """Let a request from a step that killed an engine run alone until it has computed `target` tokens."""
        self._targets[suspect] = target
        self._groups.append([suspect])
        self._isolated.add(suspect)

    def failed(self, touched: Mapping[str, int]) -> str | None:
        """Record a failed step, with the length it would have computed each request to. Returns a culprit if known."""
        suspects = sorted(touched)
        if self._groups and not self._is_others_turn:
            suspects = [i for i in self._groups.popleft() if i in touched] or suspects
        self._is_others_turn = False
        for suspect in suspects:
            self._targets[suspect] = max(touched[suspect], self._targets.get(suspect, 0))
        if len(suspects) == 1:
            return self._accuse(suspects[0])
        half = len(suspects) // 2
        self._groups.extendleft(part for part in (suspects[half:], suspects[:half]) if part)
        return None

    def _accuse(self, suspect: str) -> str | None:
        """Return the suspect if it failed alone for the second time, else let it run alone again."""
        if suspect not in self._failed_alone:
            self._failed_alone.add(suspect)
            self._groups.appendleft([suspect])
            return None
        self._failed_alone.discard(suspect)
        self._isolated.discard(suspect)
        self._targets.pop(suspect)
        return suspect

    def passed(self, computed: Mapping[str, int]) -> None:
        """Record a committed step. `computed` holds the computed tokens of every open request."""
        if self._is_others_turn:
            self._is_others_turn = False
        elif self._groups and all(
            suspect not in computed or computed[suspect] >= self._targets[suspect] for suspect in self._groups[0]
        ):
            lone = self._isolated.issuperset(self._groups[0])
            self.skip()
            self._is_others_turn = lone and self.active

    def skip(self) -> None:
        """Continue with the next group, since this one is cleared or cannot run now."""
        if self._is_others_turn:
            self._is_others_turn = False
        elif self._groups:
            for suspect in self._groups.popleft():
                self._targets.pop(suspect, None)
                self._failed_alone.discard(suspect)
                self._isolated.discard(suspect)
