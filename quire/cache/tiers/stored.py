"""A tier of block files: a local disk or a shared store, read and written by a few threads.

The engine's thread queues transfers and polls for the ones that have ended; nothing on it waits for a file. Queues are
bounded: a full one drops stores, which costs a recomputation later. A file that is missing, damaged or another block's
is a miss, is counted and is deleted where only this engine writes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.cache.chain import LINK_TOKENS
from quire.cache.tiers.blocks import BlockLayout, BlockPart, CorruptBlock
from quire.cache.tiers.folder import BlockStore
from quire.cache.tiers.seam import BlockId, BlockTransfer, TierFault, TierStats

NUM_THREADS = 4
MAX_STORES = 256  # maximum number of units that wait to be stored
MAX_LOADS = 4096
FIRST_RATE = 500e6  # bytes per second, before any load was timed
RATE_WEIGHT = 0.3  # weight of a new measurement of the rate
SPAN_SECONDS = 0.05  # duration of one measurement of the rate
SCAN_SECONDS = 2.0  # interval between two scans of a shared store
LOW_WATERMARK = 0.95  # share of the quota down to which files are deleted once it is exceeded


class HostUnits(Protocol):
    """The bytes of units in host memory. Several threads call it, each for units of its own."""

    def read(self, group: int, unit: int, first_token: int, part: BlockPart) -> bytes:
        """Return the bytes of a part: [layers, planes, tokens, heads, ...], or [layers, heads, ...] of a state."""
        ...

    def write(self, group: int, unit: int, first_token: int, part: BlockPart, body: memoryview) -> None: ...

    def seal(self, group: int, unit: int) -> None:
        """Take note that a unit was written as a whole."""
        ...

    def is_intact(self, group: int, unit: int) -> bool:
        """Whether a unit is as it was copied or sealed, as far as there is a checksum of it."""
        ...

    def has_arrived(self, group: int, unit: int) -> bool:
        """Whether the copy from the device to this unit is done. Only the engine's thread asks."""
        ...


@dataclass(slots=True)
class _Job:
    block: BlockId
    unit: int
    is_load: bool
    ok: bool = False
    corrupt: bool = False
    num_bytes: int = 0


class StoredTier:
    """Implements `Tier` between host memory and a `BlockStore`. `quota`: maximum bytes of files; None: no limit."""

    def __init__(
        self,
        name: str,
        store: BlockStore,
        layouts: Sequence[BlockLayout],
        page_tokens: int,
        memory: HostUnits,
        *,
        quota: int | None = None,
        num_threads: int = NUM_THREADS,
        on_done: Callable[[], None] = lambda: None,
    ):
        self.name = name
        self.stats = TierStats()
        self.on_done = on_done  # called by a thread when a transfer has ended
        self._store = store
        self._layouts = list(layouts)
        self._page_tokens = page_tokens
        self._memory = memory
        self._quota = quota
        self._lock = threading.Condition()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # file -> bytes, least recently used first
        self._favoured: Counter[str] = Counter()  # files of sessions
        self._jobs: deque[_Job] = deque()  # loads before stores
        self._num_stores = 0  # number of stores among the queued jobs
        self._storing: set[BlockId] = set()
        self._num_active = 0  # jobs that a thread works on
        self._load_bytes = 0  # bytes of queued and active loads
        self._span = (0.0, 0)  # begin of a run of loads, and the bytes loaded since
        self._done: deque[_Job] = deque()
        self._faults: dict[str, TierFault] = {}
        self._told: set[str] = set()
        self._rate = FIRST_RATE
        self._is_closed = False
        self._closing = threading.Event()
        self._scan()
        self._threads = [
            threading.Thread(target=self._work, name=f"quire-{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        if store.is_shared:
            threading.Thread(target=self._scan_again, name=f"quire-{name}-scan", daemon=True).start()
        for thread in self._threads:
            thread.start()

    # -- the protocol ---------------------------------------------------------------------------------------------

    def has(self, block: BlockId) -> bool:
        with self._lock:
            return bool(block.links) and all(name in self._sizes for name in self._names(block))

    def load(self, block: BlockId, unit: int) -> bool:
        with self._lock:
            if self._is_closed or len(self._jobs) - self._num_stores >= MAX_LOADS:
                return False
            self._jobs.insert(len(self._jobs) - self._num_stores, _Job(block, unit, True))
            self._load_bytes += self.unit_bytes(block.group)
            self._lock.notify()
        return True

    def store(self, block: BlockId, unit: int) -> bool:
        if block in self._storing:
            return False
        with self._lock:
            if self._is_closed or self._num_stores >= MAX_STORES:
                self.stats.drops += 1
                return False
            self._jobs.append(_Job(block, unit, False))
            self._num_stores += 1
            self._lock.notify()
        self._storing.add(block)
        return True

    def poll(self) -> list[BlockTransfer]:
        ended = []
        while self._done:
            job = self._done.popleft()
            stats = self.stats
            if not job.is_load:
                self._storing.discard(job.block)
            stats.failures += not job.ok
            stats.corrupt += job.corrupt
            if job.ok and job.is_load:
                stats.hits += 1
                stats.loaded_bytes += job.num_bytes
            elif job.ok:
                stats.stores += 1
                stats.stored_bytes += job.num_bytes
            ended.append(BlockTransfer(job.block, job.unit, job.is_load, job.ok))
        return ended

    # -- queries --------------------------------------------------------------------------------------------------

    def wrap(self, wrap: Callable[[BlockStore], BlockStore]) -> None:
        """Wrap the store, to inject faults. Only before the first transfer."""
        self._store = wrap(self._store)

    def measure(self) -> TierStats:
        """Return the counters, with what the tier holds now."""
        with self._lock:
            self.stats.queued = len(self._jobs) + self._num_active
            self.stats.num_blocks = len(self._sizes)
        return self.stats

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is queued, under way or unpolled."""
        with self._lock:
            return not (self._jobs or self._num_active or self._done)

    @property
    def has_ended(self) -> bool:
        """Whether `poll` would return a transfer."""
        return bool(self._done)

    def finish(self, seconds: float = 60.0) -> bool:
        """Wait until no transfer is queued or under way, at most so many seconds; return whether there is none."""
        with self._lock:
            return self._lock.wait_for(lambda: not (self._jobs or self._num_active), seconds)

    def seconds_for(self, num_bytes: int) -> float:
        """Return how long loads of so many bytes take, at the measured rate and behind those queued."""
        with self._lock:
            return (num_bytes + self._load_bytes) / self._rate

    def unit_bytes(self, group: int) -> int:
        """Return the bytes of a whole unit as files."""
        layout = self._layouts[group]
        count = self._page_tokens // LINK_TOKENS if layout.spec.kind == "paged" else 1
        return count * layout.block_bytes

    def files_of(self, block: BlockId) -> tuple[list[str], int]:
        """Return the names and the bytes of a block's files."""
        names = self._names(block)
        with self._lock:
            return names, sum(self._sizes.get(name, 0) for name in names)

    def favour(self, names: Iterable[str], by: int) -> None:
        """Change how many sessions want these files kept: they are deleted last."""
        with self._lock:
            for name in names:
                self._favoured[name] += by
                if self._favoured[name] <= 0:
                    del self._favoured[name]

    def rescan(self) -> None:
        """Find files that others have put into the store. Reads its whole list."""
        self._scan()

    def take_faults(self) -> list[TierFault]:
        """Return the kinds of failures that came for the first time since the last call."""
        with self._lock:
            new = [fault for kind, fault in self._faults.items() if kind not in self._told]
            self._told |= {fault.kind for fault in new}
        return new

    def cancel_all(self) -> None:
        """Drop the queued transfers and wait for those under way, so that no unit is in use."""
        with self._lock:
            self._jobs.clear()
            self._num_stores = self._load_bytes = 0
            self._lock.wait_for(lambda: not self._num_active)
            self._done.clear()
            self._storing.clear()
            self._span = (0.0, 0)

    def close(self, seconds: float = 10.0) -> None:
        """Finish the queued stores, for at most so many seconds, and end the threads."""
        until = time.monotonic() + seconds
        with self._lock:
            self._is_closed = True
            self._closing.set()
            self._jobs = deque(job for job in self._jobs if not job.is_load)
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def check(self) -> None:
        """Assert that the counts of files and jobs agree."""
        with self._lock:
            assert self.stats.num_bytes == sum(self._sizes.values()), "the sizes of files do not add up"
            assert self._num_stores == sum(not job.is_load for job in self._jobs)
            firsts = [job.is_load for job in self._jobs]
            assert firsts == sorted(firsts, reverse=True), "a store is queued before a load"

    # -- threads --------------------------------------------------------------------------------------------------

    def _names(self, block: BlockId) -> list[str]:
        layout = self._layouts[block.group]
        return [name for link in block.links for name in layout.names(link)]

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._jobs and not self._is_closed:
                    self._lock.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._num_stores -= not job.is_load
                self._num_active += 1
                if job.is_load and not self._span[0]:
                    self._span = (time.monotonic(), 0)
            try:
                (self._load if job.is_load else self._write)(job)
                job.ok = True
            except CorruptBlock as error:
                job.corrupt = True
                self._note("corrupt", f"A block in the {self.name} tier was refused: {error}.")
            except FileNotFoundError:
                self._note("missing", f"A block in the {self.name} tier is gone.")
            except Exception as error:
                what = "read" if job.is_load else "write"
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                kind = f"{what} failed: {type(error).__name__} {getattr(error, 'errno', '')}"
                self._note(kind, f"The {self.name} tier could not {what} a block: {reason}.")
            with self._lock:
                self._num_active -= 1
                if job.is_load:
                    self._measure(job)
                self._done.append(job)
                self._lock.notify_all()
            self.on_done()

    def _measure(self, job: _Job) -> None:
        """Learn the rate of loads from those that ran without a pause between them."""
        self._load_bytes -= self.unit_bytes(job.block.group)
        begin, num_bytes = self._span
        num_bytes += job.num_bytes
        elapsed = time.monotonic() - begin
        self._span = (begin, num_bytes) if self._load_bytes else (0.0, 0)
        if num_bytes and (not self._load_bytes or elapsed > SPAN_SECONDS):
            self._rate += RATE_WEIGHT * (num_bytes / max(elapsed, 1e-6) - self._rate)
            self._rate = max(self._rate, 1.0)
            self._span = (time.monotonic(), 0) if self._load_bytes else (0.0, 0)

    def _load(self, job: _Job) -> None:
        layout, memory = self._layouts[job.block.group], self._memory
        for index, link in enumerate(job.block.links):
            for part, name in zip(layout.parts, layout.names(link), strict=True):
                data = self._store.read(name, layout.file_bytes(part) + 1)
                if data is None:
                    self._forget(name)
                    raise FileNotFoundError
                try:
                    body = layout.decode(link, part, data)
                except CorruptBlock:
                    self._forget(name)
                    if not self._store.is_shared:
                        self._store.delete(name)
                    raise
                memory.write(job.block.group, job.unit, LINK_TOKENS * index, part, body)
                job.num_bytes += len(data)
                with self._lock:
                    if name in self._sizes:
                        self._sizes.move_to_end(name)
        memory.seal(job.block.group, job.unit)

    def _write(self, job: _Job) -> None:
        layout, memory = self._layouts[job.block.group], self._memory
        files: list[tuple[str, bytes]] = []
        for index, link in enumerate(job.block.links):
            for part, name in zip(layout.parts, layout.names(link), strict=True):
                with self._lock:
                    if name in self._sizes:
                        continue
                body = memory.read(job.block.group, job.unit, LINK_TOKENS * index, part)
                files.append((name, layout.encode(link, part, body)))
        if files and not memory.is_intact(job.block.group, job.unit):
            raise CorruptBlock("host memory has changed since it was copied there")  # a file would make it look right
        for name, data in files:
            self._store.write(name, data)
            job.num_bytes += len(data)
            with self._lock:
                self.stats.num_bytes += len(data) - self._sizes.pop(name, 0)
                self._sizes[name] = len(data)
        self._shrink()

    def _shrink(self) -> None:
        """Delete the least recently used files if the quota is exceeded, down to the low watermark."""
        victims = []
        with self._lock:
            if self._quota is None or self.stats.num_bytes <= self._quota:
                return
            spared = len(self._sizes) if self._favoured else 0  # files that may be passed over
            while self._sizes and self.stats.num_bytes > self._quota * LOW_WATERMARK:
                name, size = self._sizes.popitem(last=False)
                if name in self._favoured and spared > 0:
                    self._sizes[name] = size
                    spared -= 1
                    continue
                self.stats.num_bytes -= size
                self.stats.evictions += 1
                victims.append(name)
        for name in victims:
            self._store.delete(name)

    def _scan(self) -> None:
        """Replace the list of files by what the store holds, in the order of use."""
        found = sorted(self._store.scan(), key=lambda file: file.used_at)
        with self._lock:
            self._sizes = OrderedDict((file.name, file.num_bytes) for file in found)
            self.stats.num_bytes = sum(self._sizes.values())

    def _scan_again(self) -> None:
        """Find what other engines store and delete."""
        while not self._closing.wait(SCAN_SECONDS):
            try:
                self._scan()
            except OSError as error:
                self._note("scan failed", f"The {self.name} tier can't be listed: {error.strerror or error}.")

    def _forget(self, name: str) -> None:
        with self._lock:
            self.stats.num_bytes -= self._sizes.pop(name, 0)

    def _note(self, kind: str, what: str) -> None:
        with self._lock:
            self._faults.setdefault(kind, TierFault(kind, what))
