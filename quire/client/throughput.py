"""How fast the engine gets through requests, measured while it works: what an honest Retry-After is computed from.

Fed with every beat. Idle time does not count, so a server that had little to do is not taken for a slow one.
"""

from __future__ import annotations

from collections import deque

KEPT_BUSY_SECONDS = 60.0
APART_SECONDS = 0.25  # between two marks that are kept: an engine that goes idle after every request beats often
MIN_BUSY_SECONDS = 0.5
UNKNOWN_SECONDS = 1.0  # for each request, before anything was measured


class ThroughputEstimate:
    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()  # busy seconds and ended requests, as the beats said them

    def record(self, busy_seconds: float, ended: int) -> None:
        if self._marks and (busy_seconds < self._marks[-1][0] or ended < self._marks[-1][1]):
            self._marks.clear()  # another engine, which counts from zero
        if len(self._marks) > 1 and busy_seconds < self._marks[-2][0] + APART_SECONDS:
            self._marks.pop()
        self._marks.append((busy_seconds, ended))
        while len(self._marks) > 2 and self._marks[1][0] < busy_seconds - KEPT_BUSY_SECONDS:
            self._marks.popleft()

    def seconds_for(self, count: int) -> float:
        """How long until so many requests have ended, if it goes on as lately."""
        if not self._marks:
            return count * UNKNOWN_SECONDS
        busy = self._marks[-1][0] - self._marks[0][0]
        ended = self._marks[-1][1] - self._marks[0][1]
        if busy < MIN_BUSY_SECONDS:
            return count * UNKNOWN_SECONDS
        return count * busy / max(ended, 1)  # none so far: it takes at least as long as we have watched
