"""Bounds on all open connections of one server: their number and the bytes they hold.

Each `ServerConnection` reports its state; `run` makes one `OpenConnections` per server. It counts heads and unread
bodies; bodies that a route has read are counted by `HeldBodies`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.server.http.errors import ApiError

MAX_HELD = 64 << 20  # bytes of heads and unread bodies, over all connections
SPARE_FILES = 128  # file descriptors for purposes other than connections

Report = Callable[[str, ApiError], None]  # request id and error of a reply made below the application


class Droppable(Protocol):
    """A connection that can be dropped."""

    def drop(self) -> None:
        """Abort the connection."""


class OpenConnections:
    """All open connections, with their bytes and idle times."""

    def __init__(self, limit: int, max_held: int = MAX_HELD, report: Report = lambda request_id, error: None):
        self.limit = limit
        self.max_held = max_held
        self.report = report
        self.num_held = 0  # bytes
        self._open: dict[Droppable, None] = {}
        self._waiting: dict[Droppable, None] = {}  # connections without an open request; the longest wait first

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Droppable) -> bool:
        """Count a new connection. At the limit, drop the one that has waited longest for a request. Returns False if
        all have open requests."""
        if len(self._open) >= self.limit:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            self.leave(longest)
            longest.drop()
        self._open[connection] = None
        self._waiting[connection] = None
        return True

    def leave(self, connection: Droppable) -> None:
        self._open.pop(connection, None)
        self._waiting.pop(connection, None)

    def begin_wait(self, connection: Droppable) -> None:
        """Mark `connection` as without an open request."""
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def end_wait(self, connection: Droppable) -> None:
        self._waiting.pop(connection, None)

    def hold(self, change: int) -> bool:
        """Add a change of held bytes. Returns False if all connections together hold too many."""
        self.num_held += change
        return change <= 0 or self.num_held <= self.max_held


def allow_files(wanted: int) -> int:
    """Raise the process's limit of open files for `wanted` connections and return the number of connections it
    allows."""
    try:
        import resource
    except ImportError:  # a system without such a limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = wanted + SPARE_FILES
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == unlimited else max(1, min(wanted, soft - SPARE_FILES))
