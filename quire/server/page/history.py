"""The last requests, for the page's request view: what came in, how it ended, and where its time went.

The gate writes one log line per reply, and that line holds all a record needs; so the history reads along with the log
and the routes need not know of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from quire.server.logs import Log

KEPT = 200
# The tokens and times of a record; a reply that generated nothing has none of them.
MEASURES = ("prompt_tokens", "cached_tokens", "completion_tokens", "queue_seconds", "first_token_seconds")


class History:
    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._records: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._num_added = 0

    def add(self, reply: Mapping[str, Any]) -> None:
        """From the fields of a reply's log line. Only calls of the API count, not probes nor the page itself."""
        if reply.get("method") != "POST" or not str(reply.get("path", "")).startswith("/v1/"):
            return
        self._num_added += 1
        record = {name: reply.get(name) for name in ("id", "path", "status", "outcome", "seconds", *MEASURES)}
        self._records.append({"seq": self._num_added, "at": round(self._clock(), 3), **record})

    def since(self, seq: int) -> list[dict[str, Any]]:
        """All that came after the record with that number, oldest first."""
        if seq >= self._num_added:
            return []
        return [record for record in self._records if record["seq"] > seq]


class RememberingLog(Log):
    """Passes every line on, and remembers the replies, also where the log's level hides them."""

    def __init__(self, log: Log, history: History):
        super().__init__()
        self._log, self._history = log, history

    def write(self, level: str, event: str, **fields: Any) -> None:
        if event == "reply":
            self._history.add(fields)
        self._log.write(level, event, **fields)
