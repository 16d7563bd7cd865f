"""Waiting requests: a heap in the order of the policy, with lazy removal and a running count of tokens.

A preempted request returns to its former position, since its sort key does not change. Deadlines are in a separate
heap, so that no step iterates over all waiting requests. `HeldRequests` wait for another request's prefix, not a row.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import le

from quire.engine.policies import Order, OrderKey
from quire.types import Request, Status


class WaitQueue:
    """Waiting and swapped requests, in the order of the policy."""

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
            heapq.heappop(self._heap)  # entry of a removed request
        return self._heap[0][2] if self._heap else None

    def first(self, count: int) -> list[Request]:
        """Return the first `count` requests, as far as only the last part of their keys differs, which is the arrival.
        Looks at little more of the heap than it returns."""
        self.peek()
        found: list[Request] = []
        frontier = [(self._heap[0][0], 0)] if self._heap else []  # entries that may be next: key, place
        while frontier and len(found) < count:
            key, place = heapq.heappop(frontier)
            request = self._heap[place][2]
            if self._members.get(request.id) is request and not any(request is one for one in found):
                if found and key[:-1] != self._order(found[0])[:-1]:
                    break
                found.append(request)
            children = range(2 * place + 1, min(2 * place + 3, len(self._heap)))
            for child in children:
                heapq.heappush(frontier, (self._heap[child][0], child))
        return found

    def remove(self, request: Request) -> None:
        """Remove a request. Only the head leaves the heap at once; other entries are skipped later."""
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
    """Requests that wait for a page of their prompt which another request computes, by the page's key."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, list[Request]] = {}

    def __iter__(self) -> Iterator[Request]:
        return (r for requests in self._by_key.values() for r in requests if r.status is Status.HELD)

    def keys(self) -> Iterable[bytes]:
        """Return the pages that requests wait for."""
        return self._by_key.keys()

    def put(self, key: bytes, request: Request) -> None:
        request.status = Status.HELD
        self._by_key.setdefault(key, []).append(request)

    def take(self, keys: Iterable[bytes]) -> list[Request]:
        """Remove and return the requests that wait for one of these pages and have not ended."""
        return [r for key in keys for r in self._by_key.pop(key, ()) if r.status is Status.HELD]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A failed admission of the head of the queue, with the number of running requests and free units then."""

    request: Request
    num_running: int
    room: list[int]  # available units per group

    def still_holds(self, request: Request, num_running: int, room: list[int]) -> bool:
        """True if nothing was freed since, so that a long prompt need not be matched again at each step."""
        return self.request is request and num_running >= self.num_running and all(map(le, room, self.room))


class Deadlines:
    """The deadlines of open requests, checked once per step. Most requests end before theirs and are removed then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._members: dict[str, float] = {}

    def __len__(self) -> int:
        """Number of heap entries, including those of removed requests."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.id))
            self._members[request.id] = request.deadline

    def remove(self, request: Request) -> None:
        """Remove an ended request. Its heap entry stays until such entries are the majority."""
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
