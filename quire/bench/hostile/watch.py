"""Memory of a server's processes from /proc, and its event loop's delay from /metrics."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_SECONDS = 0.05
WORKERS = "quire.server.textwork.process"
_BUCKET = re.compile(r'^(quire_http_loop_\w+)_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)

Histogram = list[tuple[float, float]]  # (upper bound in seconds, number of values up to it)


def read_histograms(text: str) -> dict[str, Histogram]:
    found: dict[str, Histogram] = {}
    for name, bound, count in _BUCKET.findall(text):
        found.setdefault(name, []).append((float(bound), float(count)))
    return found


def subtract(after: Histogram, before: Histogram) -> Histogram:
    earlier = dict(before)
    return [(bound, count - earlier.get(bound, 0.0)) for bound, count in after]


def quantile(histogram: Histogram, share: float) -> float | None:
    """Return the value below which this share lies, interpolated linearly within its bucket. A share of 1.0 returns the
    upper bound of the last bucket in use, or its lower bound if the upper one is infinite. Returns None if empty."""
    total = histogram[-1][1] if histogram else 0.0
    if not total:
        return None
    low_bound = low_count = 0.0
    for bound, count in histogram:
        if count >= share * total and count > low_count:
            if bound == float("inf"):
                return low_bound
            if share == 1.0:
                return bound
            return low_bound + (bound - low_bound) * (share * total - low_count) / (count - low_count)
        low_bound, low_count = bound, count
    return low_bound


def status_bytes(pid: int, field_name: str) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field_name}:"):
                return int(line.split()[1]) << 10
    return 0


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


def is_worker(pid: int) -> bool:
    with suppress(OSError):
        return WORKERS.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@dataclass(slots=True)
class Memory:
    """Resident bytes of the HTTP process and, together, of its text workers."""

    before: int = 0
    peak: int = 0
    after: int = 0
    workers_before: int = 0
    workers_peak: int = 0
    workers_after: int = 0


@dataclass
class MemoryWatch:
    """Samples memory from `begin` to `end`. The HTTP process's peak also comes from the kernel's high-water mark, which
    samples can miss."""

    pid: int
    limit: int  # bytes at which `is_too_much` is set
    memory: Memory = field(default_factory=Memory)
    is_too_much: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None
    _marks: bool = False

    def begin(self) -> None:
        self._marks = _reset_peak(self.pid)
        self.memory = Memory()
        self._sample()
        self.memory.before, self.memory.workers_before = self.memory.after, self.memory.workers_after
        self._task = asyncio.create_task(self._watch())

    async def end(self) -> Memory:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._sample()
        if self._marks:
            self.memory.peak = max(self.memory.peak, status_bytes(self.pid, "VmHWM"))
        return self.memory

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self._sample()
            if self.memory.peak + self.memory.workers_peak > self.limit:
                self.is_too_much.set()

    def _sample(self) -> None:
        memory = self.memory
        memory.after = status_bytes(self.pid, "VmRSS")
        memory.workers_after = sum(status_bytes(child, "VmRSS") for child in children(self.pid) if is_worker(child))
        memory.peak = max(memory.peak, memory.after)
        memory.workers_peak = max(memory.workers_peak, memory.workers_after)


def _reset_peak(pid: int) -> bool:
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        return True
    return False
