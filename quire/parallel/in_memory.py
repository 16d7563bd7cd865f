"""Groups of ranks that are threads of one process, for tests and for `quire bench ranks`.

`make_group` returns one `Communicator` per rank, whose operations wait until every rank has joined them; `make_pipes`
returns one `Pipe` per stage.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from quire.kernels.native.hooks import Hook
from quire.parallel.communicator import RankTimeout
from quire.parallel.pipes import PipeTimeout

T = TypeVar("T")


@dataclass(slots=True)
class _Meeting:
    """The state that the ranks of a group share.

    Each operation passes the barrier twice: when all have given their values, and when all have read them.
    """

    size: int
    seconds: float
    barrier: threading.Barrier
    given: list[object]
    joined: list[int]  # number of operations that each rank has joined


def make_group(size: int, seconds: float = 60.0) -> list[ThreadCommunicator]:
    """Returns the communicators of a new group, one per rank. `seconds`: deadline of each operation."""
    meeting = _Meeting(size, seconds, threading.Barrier(size), [None] * size, [0] * size)
    return [ThreadCommunicator(rank, meeting) for rank in range(size)]


class ThreadCommunicator:
    """Implements `Communicator`."""

    def __init__(self, rank: int, meeting: _Meeting):
        self._rank = rank
        self._meeting = meeting

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._exchange(x.clone(), "all_reduce")
        total = first.clone()
        for other in others:
            total += other
        return total

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = self._exchange(x.clone(), "all_gather")
        assert [part.shape[-1] for part in parts] == list(sizes)
        return torch.cat(parts, -1)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert sum(sent) == len(x)
        starts = [sum(sent[:rank]) for rank in range(self.size)]
        parts = [x[start : start + count].clone() for start, count in zip(starts, sent, strict=True)]
        given = self._exchange(parts, "all_to_all")
        found = [parts[self._rank] for parts in given]
        assert [len(part) for part in found] == list(received)
        return torch.cat(found)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._exchange(x.clone() if source == self._rank else x, "broadcast")[source].clone()

    def reduction(self) -> Hook | None:
        return None

    def leave(self) -> None:
        """Ends the group: the other ranks' operations fail at once instead of at their deadline."""
        self._meeting.barrier.abort()

    def _exchange(self, value: T, operation: str) -> list[T]:
        """Returns the values of all ranks, by rank, once all of them have joined this operation."""
        meeting = self._meeting
        meeting.joined[self._rank] += 1
        meeting.given[self._rank] = value
        self._wait(operation)
        found = list(meeting.given)
        self._wait(operation)
        return found  # type: ignore[return-value]

    def _wait(self, operation: str) -> None:
        meeting = self._meeting
        try:
            meeting.barrier.wait(meeting.seconds)
        except threading.BrokenBarrierError:
            number = meeting.joined[self._rank]
            missing = [rank for rank, joined in enumerate(meeting.joined) if joined < number]
            raise RankTimeout(missing, operation, number, meeting.seconds) from None


def make_pipes(count: int, seconds: float = 60.0) -> list[ThreadPipe]:
    """Returns the pipes of `count` stages. `seconds`: deadline of receiving."""
    queues = {(a, b): queue.Queue[Tensor]() for a in range(count) for b in range(count) if a != b}
    return [ThreadPipe(stage, count, queues, seconds) for stage in range(count)]


class ThreadPipe:
    """Implements `Pipe`."""

    def __init__(self, stage: int, count: int, queues: dict[tuple[int, int], queue.Queue[Tensor]], seconds: float):
        self._stage, self._count = stage, count
        self._queues = queues  # (from stage, to stage) -> tensors on their way
        self._seconds = seconds

    @property
    def stage(self) -> int:
        return self._stage

    @property
    def count(self) -> int:
        return self._count

    def send(self, x: Tensor, to: int) -> None:
        self._queues[self._stage, to].put(x.clone())

    def receive(self, source: int) -> Tensor:
        try:
            return self._queues[source, self._stage].get(timeout=self._seconds)
        except queue.Empty:
            raise PipeTimeout(source, f"sent nothing within {self._seconds:g} s") from None
