"""The last requests, for the page's request view: what came in, how it ended, and where its time went.

The gate writes one log line per reply, and that line holds all a record needs; so the history reads along with the log
and the routes need not know of it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from quire.server.logs import Log

KEPT = 200
# The tokens and times of a record; a reply that generated nothing has none of them.
MEASURES = ("prompt_tokens", "cached_tokens", "completion_tokens", "queue_seconds", "first_token_seconds")


class History:
    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._records: deque[tuple[bytes | None, int, dict[str, Any]]] = deque(maxlen=KEPT)  # caller, its number there
        self._num_added = 0
        self._num_of: Counter[bytes | None] = Counter()  # by caller: as many as there are keys

    def add(self, reply: Mapping[str, Any], caller: bytes | None = None) -> None:
        """From the fields of a reply's log line. Only calls of the API count, not probes nor the page itself."""
        if reply.get("method") != "POST" or not str(reply.get("path", "")).startswith("/v1/"):
            return
        self._num_added += 1
        record = {name: reply.get(name) for name in ("id", "path", "status", "outcome", "seconds", *MEASURES)}
        self._num_of[caller] += 1
        numbered = {"seq": self._num_added, "at": round(self._clock(), 3), **record}
        self._records.append((caller, self._num_of[caller], numbered))

    def since(self, seq: int) -> list[dict[str, Any]]:
        """All that came after the record with that number, oldest first."""
        if seq >= self._num_added:
            return []
        return [record for _, _, record in self._records if record["seq"] > seq]

    def since_of(self, caller: bytes | None, seq: int) -> list[dict[str, Any]]:
        """The same of one caller only, by its own numbers: those of all would tell how many others there were."""
        if caller is None:
            return []
        own = [(number, record) for by, number, record in self._records if by == caller]
        return [{**record, "seq": number} for number, record in own if number > seq]


class RememberingLog(Log):
    """Passes every line on, and remembers the replies, also where the log's level hides them."""

    def __init__(self, log: Log, history: History):
        super().__init__()
        self._log, self._history = log, history

    def write(self, level: str, event: str, **fields: Any) -> None:
        if event == "reply":
            caller = fields.pop("caller", None)  # of no use in a line of the log
            self._history.add(fields, caller)
        self._log.write(level, event, **fields)
