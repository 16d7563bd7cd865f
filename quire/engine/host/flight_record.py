"""The flight record: the requests in the steps in flight, in a file that survives the engine process.

The engine process writes it around each step by wrapping its workers; after an abnormal exit the supervisor reads it.
The file is mapped memory, so writing takes microseconds and its content survives SIGKILL.
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
    """Writes the ids of the requests in flight to a mapped file."""

    def __init__(self, path: Path, max_ids: int):
        self._max_ids = max_ids
        size = _HEAD.size + max_ids * ID_BYTES
        with open(path, "wb") as file:
            file.truncate(size)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def write(self, ids: Sequence[str]) -> None:
        """Record the ids of the requests in the steps in flight."""
        self._map[: _HEAD.size] = _HEAD.pack(0)  # a write that is cut off names no request rather than a wrong one
        if ids:
            names = [name.encode("utf-8", "replace")[:ID_BYTES].ljust(ID_BYTES, b"\0") for name in ids[: self._max_ids]]
            body = b"".join(names)
            self._map[_HEAD.size : _HEAD.size + len(body)] = body
            self._map[: _HEAD.size] = _HEAD.pack(len(names))

    def close(self) -> None:
        self._map.close()


def flight_path(address: str) -> Path:
    """Return the path of the record of the engine behind a socket."""
    return Path(address.removeprefix("ipc://") + ".flight")


def read_flight_record(path: Path) -> set[str]:
    """Return the ids of the requests in flight when the writer ended; empty without a readable record."""
    try:
        content = path.read_bytes()
        (count,) = _HEAD.unpack_from(content)
    except (OSError, struct.error):
        return set()
    count = min(count, (len(content) - _HEAD.size) // ID_BYTES)
    names = (content[_HEAD.size + i * ID_BYTES : _HEAD.size + (i + 1) * ID_BYTES] for i in range(count))
    return {name.rstrip(b"\0").decode("utf-8", "replace") for name in names}


class RecordedWorkers:
    """Workers that record each step before it starts and erase it when its tokens are on the host."""

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
        """Erase a step and all earlier ones, since steps run in order."""
        self._in_flight.take_committed(plan.step)
        self._write()

    def warm_ups(self) -> Iterator[None]:
        return self._inner.warm_ups()

    def close(self) -> None:
        self._inner.close()
        self._recorder.close()

    def _write(self) -> None:
        self._recorder.write([row.request_id for plan in self._in_flight for row in plan.rows])

    def clear(self) -> None:
        """Erase all steps, since the engine drops every step in flight after one has failed."""
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
