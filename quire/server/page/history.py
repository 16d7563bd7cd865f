"""The history of recent requests for the page's request view: input, outcome and times.

The gate writes one log line per reply, which holds all fields of a record, so the history is filled from the log.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from quire.server.logs import Log

KEPT = 200
# Token counts and times of a record, which only replies of generating routes have.
MEASURES = ("prompt_tokens", "cached_tokens", "completion_tokens", "queue_seconds", "first_token_seconds")


class History:
    """The records of the newest replies, by caller."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        # Caller, the record's number among those of the caller, record.
        self._records: deque[tuple[bytes | None, int, dict[str, Any]]] = deque(maxlen=KEPT)
        self._num_added = 0
        self._num_of: Counter[bytes | None] = Counter()  # records by caller; bounded by the number of keys

    def add(self, reply: Mapping[str, Any], caller: bytes | None = None) -> None:
        """Add a record from the fields of a reply's log line. Probes and the page's own requests are ignored."""
        if reply.get("method") != "POST" or not str(reply.get("path", "")).startswith("/v1/"):
            return
        self._num_added += 1
        record = {name: reply.get(name) for name in ("id", "path", "status", "outcome", "seconds", *MEASURES)}
        self._num_of[caller] += 1
        numbered = {"seq": self._num_added, "at": round(self._clock(), 3), **record}
        self._records.append((caller, self._num_of[caller], numbered))

    def since(self, seq: int) -> list[dict[str, Any]]:
        """All records after that number, oldest first."""
        if seq >= self._num_added:
            return []
        return [record for _, _, record in self._records if record["seq"] > seq]

    def since_of(self, caller: bytes | None, seq: int) -> list[dict[str, Any]]:
        """The records of one caller by its own numbers, because global numbers reveal the number of other requests."""
        if caller is None:
            return []
        own = [(number, record) for by, number, record in self._records if by == caller]
        return [{**record, "seq": number} for number, record in own if number > seq]


class RememberingLog(Log):
    """Forwards every line and records the replies, including those below the log's level."""

    def __init__(self, log: Log, history: History):
        super().__init__()
        self._log, self._history = log, history

    def write(self, level: str, event: str, **fields: Any) -> None:
        if event == "reply":
            caller = fields.pop("caller", None)  # for the history only, not for the log
            self._history.add(fields, caller)
        self._log.write(level, event, **fields)
