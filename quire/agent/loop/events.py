"""What happens in a session, as events for front ends and scripts, with the names of Codex's `--json`.

An event is a JSON object with a `type`; items have an id, a type and a status, and an update carries what was added.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]
Emit = Callable[[Event], None]

THREAD_STARTED = "thread.started"
TURN_STARTED, TURN_COMPLETED, TURN_FAILED = "turn.started", "turn.completed", "turn.failed"
ITEM_STARTED, ITEM_UPDATED, ITEM_COMPLETED = "item.started", "item.updated", "item.completed"
ERROR = "error"
_ITEM_TYPES = {"shell": "command_execution", "write_file": "file_change", "edit_file": "file_change"}


class ItemStream:
    """Numbers the items of a session and emits their events."""

    def __init__(self, emit: Emit) -> None:
        self._to = emit
        self._lock = threading.Lock()  # tools that run side by side emit from their own threads
        self._numbers = itertools.count()

    def _emit(self, event: Event) -> None:
        with self._lock:
            self._to(event)

    def event(self, kind: str, **fields: Any) -> None:
        self._emit({"type": kind, **fields})

    def start(self, kind: str, **fields: Any) -> Event:
        item = {"id": f"item_{next(self._numbers)}", "type": kind, **fields}
        self._emit({"type": ITEM_STARTED, "item": dict(item)})
        return item

    def update(self, item: Event, **fields: Any) -> None:
        """Emits what was added to an item, such as `delta`; it is not kept in the item."""
        self._emit({"type": ITEM_UPDATED, "item": {"id": item["id"], "type": item["type"], **fields}})

    def complete(self, item: Event, **fields: Any) -> None:
        item |= fields
        self._emit({"type": ITEM_COMPLETED, "item": dict(item)})

    def note(self, text: str) -> None:
        """Emits an item that tells the user something that is no failure of the turn."""
        item = {"id": f"item_{next(self._numbers)}", "type": "error", "message": text}
        self._emit({"type": ITEM_COMPLETED, "item": item})


def item_type(tool: str) -> str:
    if tool.startswith("mcp__"):
        return "mcp_tool_call"
    return _ITEM_TYPES.get(tool, "tool_call")
