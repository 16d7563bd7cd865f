"""The flight recorder: which requests are in the steps under way, in a file that outlives the process.

The engine process writes it around every step, through the `Workers` seam; after a death the supervisor reads who was
aboard. It is mapped memory, so writing costs microseconds and what was written survives even SIGKILL.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.workers import Ticket, Workers
from quire.types import Plan, StepOutput
from quire.types.step_queue import StepQueue

ID_BYTES = 64
_HEAD = struct.Struct("<I")


class FlightRecorder:
    def __init__(self, path: Path, max_ids: int):
        self._max_ids = max_ids
        size = _HEAD.size + max_ids * ID_BYTES
        with open(path, "wb") as file:
            file.truncate(size)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def write(self, ids: Sequence[str]) -> None:
        """These are in the steps under way; none: nothing is."""
        self._map[: _HEAD.size] = _HEAD.pack(0)  # torn in the middle it names nobody rather than the wrong ones
        if ids:
            names = [name.encode("utf-8", "replace")[:ID_BYTES].ljust(ID_BYTES, b"\0") for name in ids[: self._max_ids]]
            body = b"".join(names)
            self._map[_HEAD.size : _HEAD.size + len(body)] = body
            self._map[: _HEAD.size] = _HEAD.pack(len(names))

    def close(self) -> None:
        self._map.close()


def flight_path(address: str) -> Path:
    """Where the engine behind a socket writes its record."""
    return Path(address.removeprefix("ipc://") + ".flight")


def read_flight_record(path: Path) -> set[str]:
    """Who was aboard when the writer ended; nobody if there is no readable record."""
    try:
        content = path.read_bytes()
        (count,) = _HEAD.unpack_from(content)
    except (OSError, struct.error):
        return set()
    count = min(count, (len(content) - _HEAD.size) // ID_BYTES)
    names = (content[_HEAD.size + i * ID_BYTES : _HEAD.size + (i + 1) * ID_BYTES] for i in range(count))
    return {name.rstrip(b"\0").decode("utf-8", "replace") for name in names}


class RecordedWorkers:
    """Workers whose steps are noted before they start and struck out when their tokens are there."""

    def __init__(self, inner: Workers, recorder: FlightRecorder):
        self._inner = inner
        self._recorder = recorder
        self._in_flight: StepQueue[Plan] = StepQueue()

    def forward(self, plan: Plan) -> Any:
        self._in_flight.put(plan, plan.step)
        self._write()
        try:
            return _RecordedForward(plan, self._inner.forward(plan))
        except BaseException:
            self.clear()
            raise

    def sample(self, forward: Any, masks: Mapping[int, bytes] | None = None) -> Ticket:
        try:
            return _RecordedTicket(self, forward.plan, self._inner.sample(forward.inner, masks))
        except BaseException:
            self.clear()
            raise

    def committed(self, plan: Plan) -> None:
        """Steps run in order: what was planned before it has committed too, or was given up between two calls."""
        self._in_flight.take_committed(plan.step)
        self._write()

    def chores(self) -> Iterator[None]:
        return self._inner.chores()

    def close(self) -> None:
        self._inner.close()
        self._recorder.close()

    def _write(self) -> None:
        self._recorder.write([row.request_id for plan in self._in_flight for row in plan.rows])

    def clear(self) -> None:
        """A step failed in a way the engine survives: it drops every step in flight and starts afresh."""
        self._in_flight.clear()
        self._write()


@dataclass(frozen=True, slots=True)
class _RecordedForward:
    plan: Plan
    inner: Any


@dataclass(frozen=True, slots=True)
class _RecordedTicket:
    workers: RecordedWorkers
    plan: Plan
    inner: Ticket

    def wait(self) -> StepOutput:
        try:
            output = self.inner.wait()
        except BaseException:
            self.workers.clear()
            raise
        self.workers.committed(self.plan)
        return output
