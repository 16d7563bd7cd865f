"""Who has something to do with a step that failed, and finding the one request that breaks it: halve the suspects until
the culprit is alone.

After a failed step everyone it touched has fallen back to committed state. The groups here say who may run next;
a group that gets past the point where it failed is cleared, one that fails again is halved, and a lone suspect that
fails twice is the culprit. Who was in a step that killed the process is alone from the start, since it may not be tried
again in company; between two of these everyone else, the cleared ones included, gets a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping

from quire.cache.lease import lease_of
from quire.types import CopyKind, Plan, Request, Status


def affected_by(plans: list[Plan], requests: Iterable[Request]) -> list[Request]:
    """Who has a row in one of these steps, or is in flight otherwise, or had bytes on their way to the host in them."""
    rows = {row.request_id for plan in plans for row in plan.rows}
    rows |= {row.request_id for plan in plans for row in plan.added}
    moved = {(copy.group, copy.target) for plan in plans for copy in plan.copies if copy.kind is CopyKind.OUT}

    def is_touched(request: Request) -> bool:
        if request.status is Status.SWAPPED:
            return any((group, unit) in moved for group, units in enumerate(lease_of(request).host) for unit in units)
        return request.row >= 0 and (request.id in rows or request.inflight > 0)

    return [request for request in requests if is_touched(request)]


class AllExcept:
    """Everyone but these."""

    def __init__(self, names: set[str]):
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name not in self._names


class Bisection:
    def __init__(self) -> None:
        self._groups: deque[list[str]] = deque()
        self._isolated: set[str] = set()  # suspects of a death
        self._is_others_turn = False
        self._targets: dict[str, int] = {}  # how many tokens each suspect must have computed to be cleared
        self._failed_alone: set[str] = set()  # once: it may have been bad luck

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def active(self) -> bool:
        return bool(self._groups)

    @property
    def group(self) -> Container[str] | None:
        """Who may run now; None: everyone."""
        if self._is_others_turn:
            return AllExcept({suspect for group in self._groups for suspect in group})
        return set(self._groups[0]) if self._groups else None

    def isolate(self, suspect: str, target: int) -> None:
        """Someone who was in a step that took a whole engine down runs alone until it is past that point."""
        self._targets[suspect] = target
        self._groups.append([suspect])
        self._isolated.add(suspect)

    def failed(self, touched: Mapping[str, int]) -> str | None:
        """A step failed that would have brought these to so many tokens. Returns the culprit if no doubt is left."""
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
        """Alone in a step that failed. A fault that passes can hit anyone once; whoever fails alone twice is it."""
        if suspect not in self._failed_alone:
            self._failed_alone.add(suspect)
            self._groups.appendleft([suspect])
            return None
        self._failed_alone.discard(suspect)
        self._isolated.discard(suspect)
        self._targets.pop(suspect)
        return suspect

    def passed(self, computed: Mapping[str, int]) -> None:
        """A step committed; `computed` says how far everyone who has not ended is now."""
        if self._is_others_turn:
            self._is_others_turn = False
        elif self._groups and all(
            suspect not in computed or computed[suspect] >= self._targets[suspect] for suspect in self._groups[0]
        ):
            lone = self._isolated.issuperset(self._groups[0])
            self.skip()
            self._is_others_turn = lone and self.active

    def skip(self) -> None:
        """Go on with the next group: this one is cleared, or none of it can run now."""
        if self._is_others_turn:
            self._is_others_turn = False
        elif self._groups:
            for suspect in self._groups.popleft():
                self._targets.pop(suspect, None)
                self._failed_alone.discard(suspect)
                self._isolated.discard(suspect)
