"""The bounded queue of errors that `/admin/errors` shows to operators.

The oldest entries are dropped first; the counts stay. An entry has the error, the request ids and the time, and never
contains a prompt or generated text.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

MAX_KEPT = 1000
MAX_IDS = 64  # per entry
MAX_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Failure:
    """One entry of the queue."""

    number: int  # counts from 1 since the server started
    at: float  # Unix seconds
    kind: str  # request, step, engine, message, check
    code: str
    what: str
    ids: tuple[str, ...] = ()


@dataclass(slots=True)
class ErrorQueue:
    """The newest failures, and counts of all."""

    clock: Callable[[], float] = time.time
    counts: Counter[str] = field(default_factory=Counter)  # by "kind/code", since the server started
    total: int = 0
    _kept: deque[Failure] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))

    def put(self, kind: str, code: str, what: str, ids: Sequence[str] = ()) -> None:
        self.total += 1
        self.counts[f"{kind}/{code}"] += 1
        self._kept.append(Failure(self.total, self.clock(), kind, code, what[:MAX_CHARS], tuple(ids[:MAX_IDS])))

    def newest(self, limit: int = 100) -> list[Failure]:
        return list(islice(reversed(self._kept), limit))
