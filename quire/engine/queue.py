"""Requests that wait: a heap by the order policy, with removal in constant time and a running count of tokens.

A request that was pushed back keeps its place, because its key does not change. Deadlines have a heap of their own,
so that a step never walks over everyone who waits. Beside the queue stand those who wait for another's prompt.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import le

from quire.engine.policies import Order, OrderKey
from quire.types import Request, Status


class WaitQueue:
    def __init__(self, order: Order):
        self._order = order
        self._heap: list[tuple[OrderKey, int, Request]] = []
        self._members: dict[str, Request] = {}
        self._ticket = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def push(self, request: Request) -> None:
        assert request.id not in self._members
        self._ticket += 1
        heapq.heappush(self._heap, (self._order(request), self._ticket, request))
        self._members[request.id] = request
        self.num_tokens += len(request.tokens)

    def peek(self) -> Request | None:
        while self._heap and self._members.get(self._heap[0][2].id) is not self._heap[0][2]:
            heapq.heappop(self._heap)  # removed earlier
        return self._heap[0][2] if self._heap else None

    def remove(self, request: Request) -> None:
        """Whoever is at the head goes at once; others leave their heap entry behind to be skipped."""
        if self._members.pop(request.id, None) is not None:
            self.num_tokens -= len(request.tokens)
            if self._heap[0][2] is request:
                heapq.heappop(self._heap)
            elif len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
                self._heap = [entry for entry in self._heap if self._members.get(entry[2].id) is entry[2]]
                heapq.heapify(self._heap)

    def check(self) -> None:
        live = [entry[2] for entry in self._heap if self._members.get(entry[2].id) is entry[2]]
        assert {id(r) for r in live} == {id(r) for r in self._members.values()}
        assert self.num_tokens == sum(len(r.tokens) for r in self._members.values())
        assert all(r.status in (Status.WAITING, Status.SWAPPED) for r in self._members.values())


class HeldRequests:
    """Requests that wait for a page of their prompt which another one computes, by that page's key."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[Request]] = {}

    def __iter__(self) -> Iterator[Request]:
        return (r for requests in self._by_key.values() for r in requests if r.status is Status.HELD)

    def put(self, key: bytes, request: Request) -> None:
        request.status = Status.HELD
        self._by_key.setdefault(key, []).append(request)

    def take(self, keys: Iterable[bytes]) -> list[Request]:
        """Whoever waited for one of these pages; those that ended meanwhile are forgotten."""
        return [r for key in keys for r in self._by_key.pop(key, ()) if r.status is Status.HELD]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The cache had no room for the head of the queue, when so many were running and so much was free."""

    request: Request
    num_running: int
    room: list[int]  # units that could be had, per group

    def still_holds(self, request: Request, num_running: int, room: list[int]) -> bool:
        """Nothing was freed since: matching a long prompt at every step is costly."""
        return self.request is request and num_running >= self.num_running and all(map(le, room, self.room))


class Deadlines:
    """Which requests have run out of time; asked once a step. Most end long before: they are forgotten then, and not
    when their time would have come."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._members: dict[str, float] = {}

    def __len__(self) -> int:
        """Entries held, those of the forgotten included."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.id))
            self._members[request.id] = request.deadline

    def remove(self, request: Request) -> None:
        """It has ended. Its entry stays behind until such entries are the larger part."""
        self._members.pop(request.id, None)
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = [(at, name) for name, at in self._members.items()]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> list[str]:
        out = []
        while self._heap and self._heap[0][0] <= now:
            at, name = heapq.heappop(self._heap)
            if self._members.get(name) == at:
                out.append(name)
        return out
