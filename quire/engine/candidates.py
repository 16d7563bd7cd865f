"""Which of the first waiting requests is admitted: the first one, or the one whose prefix is cached.

`Scheduler` asks when a row is free. Only requests that the order ranks alike, but for their arrival, compete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.types import Request

MAX_CANDIDATES = 16


class Candidates(Protocol):
    """The choice among the first waiting requests, which are in order and at least one."""

    num_seen: int  # requests that it wants to choose from

    def choose(self, waiting: Sequence[Request], cached_len: Callable[[Request], int], now: float) -> Request: ...


class InOrder:
    """Always the first."""

    num_seen = 1

    def choose(self, waiting: Sequence[Request], cached_len: Callable[[Request], int], now: float) -> Request:
        return waiting[0]


class PrefixAware:
    """The request with the fewest tokens to compute, so that cached prefixes are used before they are evicted.

    The first request waits at most `max_wait` seconds for others; after that it is the next one.
    """

    num_seen = MAX_CANDIDATES

    def __init__(self, max_wait: float):
        self._max_wait = max_wait

    def choose(self, waiting: Sequence[Request], cached_len: Callable[[Request], int], now: float) -> Request:
        first = waiting[0]
        if now - first.arrival > self._max_wait:
            return first
        share = {one.id: cached_len(one) / len(one.tokens) for one in waiting}
        return max(waiting, key=lambda one: share[one.id])  # the first of equals
