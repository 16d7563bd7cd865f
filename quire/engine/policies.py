"""Policies of the scheduler: the order of requests, admission to the queue, and the choice of victims.

Each policy is a protocol of one method and is passed to `Scheduler`. `Order` has three implementations, `Admission` and
`Victims` have one each. The policy that sizes the chunks of a prompt is in `chunking`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from quire.types import QuireError, Request

OrderKey = tuple[float, ...]


class Order(Protocol):
    """The sort key of a request: the smallest runs first, the largest is preempted first."""

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
    """Admission control: raises if the queue has no room for a request.

    `num_open` is the number of requests that run or wait.
    """

    def admit(self, request: Request, num_open: int, num_waiting_tokens: int) -> None: ...


class QueueBounds:
    """Bounds on the requests and prompt tokens that wait.

    A request for which a row is free does not count as waiting, even before the next plan assigns the row.
    """

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
    """The choice of the request to preempt for `needy` when the cache is full; None: `needy` itself."""

    def choose(self, running: Iterable[Request], needy: Request) -> Request | None: ...


class LastInOrder:
    """Preempts the last request in order. A request never preempts one that precedes it."""

    def __init__(self, order: Order):
        self._order = order

    def choose(self, running: Iterable[Request], needy: Request) -> Request | None:
        victim = max(running, key=self._order, default=None)
        if victim is None or self._order(victim) <= self._order(needy):
            return None
        return victim
