"""Traces of the engine's host work in Chrome's trace-event format, which Perfetto opens.

Each event is one line with a JSON object inside an array. Viewers accept an array without its end, so a killed process
leaves a readable file. `NO_TRACE` records nothing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from quire.types import Delta, Plan, QuireError, Request


class Tracer:
    """A tracer that records nothing; the default, and the base class of `FileTracer`."""

    def span(self, name: str, plan: Plan | None = None) -> AbstractContextManager[None]:
        return _NOTHING

    def note(self, name: str, **details: Any) -> None:
        pass

    def step(self, plan: Plan, scheduler: Any) -> None:
        pass

    def begin_request(self, request: Request) -> None:
        pass

    def end_request(self, delta: Delta) -> None:
        pass

    def close(self) -> None:
        pass


_NOTHING = nullcontext()
NO_TRACE = Tracer()
MAX_LINE = 1 << 20  # maximum bytes of an event
_END = b"\n]\n"  # end of a closed trace


class FileTracer(Tracer):
    """A tracer that writes events to a file."""

    def __init__(self, path: str | Path, engine_number: int = 1):
        """`engine_number` counts the engines of one server. The first one begins the file, a later one appends to it,
        so that one trace shows all engines of the server, each as a process."""
        try:
            appends = engine_number > 1 and _reopen(Path(path))
            self._file: TextIO = open(path, "a" if appends else "w", encoding="utf-8")  # noqa: SIM115 - see close()
        except OSError as error:
            hint = "Choose a file that can be written."
            raise QuireError(
                "bad_trace_file", f"The trace can't be written to {path}: {error.strerror}.", hint
            ) from error
        self._lock = threading.Lock()  # a device may record events from another thread
        if not appends:
            self._file.write("[\n")
        name = "quire" if engine_number == 1 else f"quire (engine {engine_number})"
        self._emit({"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": name}})
        self._file.flush()  # an engine that dies early still appears in the trace

    @contextmanager
    def span(self, name: str, plan: Plan | None = None) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            args = {"step": plan.step, "rows": len(plan.rows), "tokens": plan.num_tokens} if plan else {}
            self._emit({"name": name, "ph": "X", "ts": begin, "dur": self._now() - begin, "tid": 1, "args": args})

    def note(self, name: str, **details: Any) -> None:
        self._emit({"name": name, "ph": "i", "ts": self._now(), "tid": 1, "s": "p", "args": details})

    def step(self, plan: Plan, scheduler: Any) -> None:
        ts = self._now()
        queues = {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}
        free = {f"group {g}": scheduler.cache.available(g) for g in range(len(scheduler.cache.specs))}
        self._emit({"name": "requests", "ph": "C", "ts": ts, "args": queues})
        self._emit({"name": "batch tokens", "ph": "C", "ts": ts, "args": {"tokens": plan.num_tokens}})
        self._emit({"name": "free cache units", "ph": "C", "ts": ts, "args": free})
        shares = scheduler.stats.idle_shares()
        if shares:
            idle = {f"stage {stage}": round(share, 4) for stage, share in enumerate(shares)}
            self._emit({"name": "idle share of stages", "ph": "C", "ts": ts, "args": idle})

    def begin_request(self, request: Request) -> None:
        event = {
            "name": "request",
            "cat": "request",
            "ph": "b",
            "id2": {"local": request.id},
            "ts": self._now(),
            "tid": 2,
        }
        self._emit({**event, "args": {"prompt_tokens": request.prompt_len}})

    def end_request(self, delta: Delta) -> None:
        event = {
            "name": "request",
            "cat": "request",
            "ph": "e",
            "id2": {"local": delta.request_id},
            "ts": self._now(),
            "tid": 2,
        }
        reason = delta.finish_reason.value if delta.finish_reason else ""
        self._emit({**event, "args": {"finish_reason": reason}})
        self._file.flush()  # so that a viewer sees ended requests while the engine runs

    def close(self) -> None:
        if not self._file.closed:
            self._file.write(json.dumps({"name": "end", "ph": "i", "ts": self._now(), "pid": os.getpid(), "s": "p"}))
            self._file.write("\n]\n")
            self._file.close()

    def _now(self) -> float:
        return time.monotonic_ns() / 1000  # microseconds, on a clock that all processes of a machine share

    def _emit(self, event: dict[str, Any]) -> None:
        line = json.dumps({"pid": os.getpid(), **event}) + ",\n"
        with self._lock:
            if not self._file.closed:
                self._file.write(line)


def _reopen(path: Path) -> bool:
    """Prepare the trace of an earlier engine for appending: remove the end of the array, or a last line that was cut
    off. False if there is no such trace."""
    if not path.is_file():
        return False
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MAX_LINE)
        file.seek(start)
        tail = file.read()
        if tail.endswith(_END):
            file.truncate(size - len(_END))
            file.seek(0, os.SEEK_END)
            file.write(b",\n")
            return True
        whole = tail.rfind(b"\n") + 1
        file.truncate(start + whole)
        return whole > 0
