"""The scheduler's choices as small plug-ins: who goes first, how much of a prompt a step takes, who must give way.

Each is a protocol of one method with more than one implementation; `Scheduler` gets them at construction.
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


class Chunking(Protocol):
    """How many tokens the next step may compute, given how many rows decode; told how long steps took."""

    def budget(self, num_decodes: int) -> int: ...
    def observe(self, num_tokens: int, seconds: float) -> None: ...


class TokenBudget:
    """A fixed number of tokens a step."""

    def __init__(self, max_batch_tokens: int):
        self._max = max_batch_tokens

    def budget(self, num_decodes: int) -> int:
        return self._max

    def observe(self, num_tokens: int, seconds: float) -> None:
        pass


class StepTarget:
    """Keep steps short enough for running requests: prompt chunks shrink until a step meets its target time.

    A step's time is taken as base + tokens * slope. Both are estimated from what was observed; while nothing decodes
    there is nobody to disturb, and the whole budget is used.
    """

    FLOOR = 16  # never starve a prompt altogether
    MEMORY = 0.9  # weight of the past in the running sums

    def __init__(self, max_batch_tokens: int, target_seconds: float):
        self._max = max_batch_tokens
        self._target = target_seconds
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # decayed sums for a least-squares line

    def budget(self, num_decodes: int) -> int:
        base, slope = self._line()
        if num_decodes == 0 or slope <= 0:
            return self._max
        room = int((self._target - base) / slope)
        return max(num_decodes + self.FLOOR, min(self._max, room))

    def observe(self, num_tokens: int, seconds: float) -> None:
        keep, x, y = self.MEMORY, float(num_tokens), seconds
        self._n, self._x, self._y = keep * self._n + 1, keep * self._x + x, keep * self._y + y
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * y

    def _line(self) -> tuple[float, float]:
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-9 * max(1.0, self._xx):
            slope = self._y / self._x if self._x else 0.0  # one size seen so far: blame every token alike
            return 0.0, slope
        slope = (self._n * self._xy - self._x * self._y) / spread
        return (self._y - slope * self._x) / self._n, slope


def choose_chunking(max_batch_tokens: int, step_target_seconds: float | None) -> Chunking:
    if step_target_seconds is None:
        return TokenBudget(max_batch_tokens)
    return StepTarget(max_batch_tokens, step_target_seconds)


class Admission(Protocol):
    """Refuse a request the queue has no room for, by raising."""

    def admit(self, request: Request, num_waiting: int, num_waiting_tokens: int) -> None: ...


class QueueBounds:
    def __init__(self, max_waiting: int, max_waiting_tokens: int):
        self._max_waiting = max_waiting
        self._max_tokens = max_waiting_tokens

    def admit(self, request: Request, num_waiting: int, num_waiting_tokens: int) -> None:
        if num_waiting >= self._max_waiting:
            what = f"{num_waiting} requests already wait (max_waiting={self._max_waiting})."
            raise QuireError("queue_full", what, "Retry later, or raise max_waiting.")
        if num_waiting and num_waiting_tokens + len(request.tokens) > self._max_tokens:
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
