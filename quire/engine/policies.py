"""The scheduler's choices as small plug-ins: which request goes first, which is let in, which must give way.

Each is a protocol of one method, and `Scheduler` gets them at construction. `Order` has three implementations,
`Admission` and `Victims` have one each. How much of a prompt a step takes is another such choice, in `pacing`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from quire.types import QuireError, Request

OrderKey = tuple[float, ...]


class Order(Protocol):
    """A sort key; the smallest goes first, and the largest is the first to give way."""

    def __call__(self, request: Request) -> OrderKey: ...


def fcfs(request: Request) -> OrderKey:
    return (request.arrival,)


def by_priority(request: Request) -> OrderKey:
    return (request.priority, request.arrival)


def by_deadline(request: Request) -> OrderKey:
    deadline = math.inf if request.deadline is None else request.deadline
    return (deadline, request.priority, request.arrival)


ORDERS: dict[str, Order] = {"fcfs": fcfs, "priority": by_priority, "deadline": by_deadline}


class Admission(Protocol):
    """Refuse a request the queue has no room for, by raising. `num_open`: requests that run or wait."""

    def admit(self, request: Request, num_open: int, num_waiting_tokens: int) -> None: ...


class QueueBounds:
    """Who will find a row free does not wait, though the next step has yet to give it one."""

    def __init__(self, max_rows: int, max_waiting: int, max_waiting_tokens: int):
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._max_tokens = max_waiting_tokens

    def admit(self, request: Request, num_open: int, num_waiting_tokens: int) -> None:
        num_waiting = num_open - self._max_rows
        if num_waiting >= self._max_waiting:
            what = f"{num_waiting} requests already wait (max_waiting={self._max_waiting})."
            raise QuireError("queue_full", what, "Retry later, or raise max_waiting.")
        if num_waiting_tokens and num_waiting_tokens + len(request.tokens) > self._max_tokens:
            what = f"{num_waiting_tokens} prompt tokens already wait (max_waiting_tokens={self._max_tokens})."
            raise QuireError("queue_full", what, "Retry later, or raise max_waiting_tokens.")


class Victims(Protocol):
    """Which running request gives way when the cache is full; None when `needy` itself should."""

    def choose(self, running: Iterable[Request], needy: Request) -> Request | None: ...


class LastInOrder:
    """The lowest priority and, among those, the newest. A request never pushes out one that goes before it."""

    def __init__(self, order: Order):
        self._order = order

    def choose(self, running: Iterable[Request], needy: Request) -> Request | None:
        victim = max(running, key=self._order, default=None)
        if victim is None or self._order(victim) <= self._order(needy):
            return None
        return victim
