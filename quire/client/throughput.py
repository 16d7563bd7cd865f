"""Estimates how fast the engine completes requests; Retry-After is computed from it.

The client records every beat of the engine. Only busy time counts, so that an idle server is not taken for a slow one.
"""

from __future__ import annotations

from collections import deque

KEPT_BUSY_SECONDS = 60.0
APART_SECONDS = 0.25  # minimum between two kept marks: an engine that goes idle after every request sends many beats
MIN_BUSY_SECONDS = 0.5
UNKNOWN_SECONDS = 1.0  # per request, before the first measurement


class ThroughputEstimate:
    """Requests per busy second, over the last beats."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()  # busy seconds and ended requests of beats

    def record(self, busy_seconds: float, ended: int) -> None:
        if self._marks and (busy_seconds < self._marks[-1][0] or ended < self._marks[-1][1]):
            self._marks.clear()  # a new engine, whose counters start at zero
        if len(self._marks) > 1 and busy_seconds < self._marks[-2][0] + APART_SECONDS:
            self._marks.pop()
        self._marks.append((busy_seconds, ended))
        while len(self._marks) > 2 and self._marks[1][0] < busy_seconds - KEPT_BUSY_SECONDS:
            self._marks.popleft()

    def seconds_for(self, count: int) -> float:
        """Return the estimated seconds until `count` more requests have ended."""
        if not self._marks:
            return count * UNKNOWN_SECONDS
        busy = self._marks[-1][0] - self._marks[0][0]
        ended = self._marks[-1][1] - self._marks[0][1]
        if busy < MIN_BUSY_SECONDS:
            return count * UNKNOWN_SECONDS
        return count * busy / max(ended, 1)  # none ended: a request takes at least the time observed
