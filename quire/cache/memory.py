"""The memory plan: how many pages, state slots and host units fit, computed before anything is allocated.

Pure arithmetic from cache specs, sizes and limits, without a profiling run. `quire.startup` allocates the cache from
it, and `quire doctor` prints it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quire.config import CacheConfig
from quire.types import CacheSpec, QuireError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}
GIB = 1 << 30
MIN_SLOTS = 3  # scratch, a live state, a snapshot
CPU_CACHE_LIMIT = 2 * GIB  # default limit on a CPU, whose memory other programs share
HOST_LIMITS = {"cpu": 1 * GIB, "cuda": 8 * GIB}  # default bytes of host swap; pinned on CUDA, allocated when first used
HOST_SHARE = 0.25
# Pages and state slots are divided such that conversations of this many tokens exhaust both at the same time. A slot
# each for the live state, the snapshot that the next turn starts from, and one of a shared prefix or an open answer.
CONVERSATION_TOKENS = 4096
CONVERSATION_SLOTS = 3
# Windows per conversation: its current position, and the position from which another turn or conversation starts.
CONVERSATION_WINDOWS = 2
STEPS_PER_WINDOW_POOL = 3  # steps whose pages a window pool holds at once: planned, in flight, and pending-free
MAX_SLOTS_PER_ROW = 64  # limit for tiny models, which have room for more snapshots than hits


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The planned sizes of the cache and of everything else that takes device memory."""

    device: str
    available: int  # bytes free on the device once the weights are loaded
    weights: int
    activations: int
    rows: int
    specs: tuple[CacheSpec, ...]
    num_units: tuple[int, ...]  # per group, including the scratch unit
    num_host_units: tuple[int, ...] | None
    capacity_tokens: int  # the longest sequence that fits
    max_model_len: int
    notes: tuple[str, ...] = field(default=())

    @property
    def cache(self) -> int:
        return sum(unit_bytes(s) * n for s, n in zip(self.specs, self.num_units, strict=True))

    @property
    def host(self) -> int:
        return sum(unit_bytes(s) * n for s, n in zip(self.specs, self.num_host_units or (), strict=False))

    def lines(self) -> list[str]:
        rows = [
            ("weights", self.weights, ""),
            ("activations", self.activations, "estimate for the largest step"),
            ("rows", self.rows, "tokens and page tables of running requests"),
        ]
        for spec, count in zip(self.specs, self.num_units, strict=True):
            what = f"{count - 1} slots"
            if spec.kind == "paged":
                what = f"{(count - 1) * spec.page_tokens} tokens: {count - 1} pages of {spec.page_tokens}"
            what += f", {_bytes(unit_bytes(spec))} each"
            rows.append((f"cache '{spec.group}'", unit_bytes(spec) * count, what))
        rows.append(("host", self.host, "for preempted requests and evicted pages, taken when used"))
        lines = [f"{name:<18} {_bytes(size):>10}  {note}".rstrip() for name, size, note in rows]
        lines.append(f"{'available':<18} {_bytes(self.available):>10}  on {self.device}")
        return lines + [f"note: {note}" for note in self.notes]

    def to_json(self) -> dict[str, Any]:
        groups = [
            {
                "group": s.group,
                "kind": s.kind,
                "units": n - 1,
                "unit_bytes": unit_bytes(s),
                "layers": len(s.layers),
                "page_tokens": s.page_tokens,
                "window": s.window,
            }
            for s, n in zip(self.specs, self.num_units, strict=True)
        ]
        plain = {k: v for k, v in asdict(self).items() if k not in ("specs", "num_units", "num_host_units")}
        return {**plain, "groups": groups, "cache": self.cache, "host": self.host}


def unit_bytes(spec: CacheSpec) -> int:
    """Returns the bytes of a page or slot: at least one, for a pipeline stage that has no layer of this group."""
    return max(1, spec.unit_elements * DTYPE_BYTES[spec.dtype])


def plan_memory(
    specs: list[CacheSpec],
    config: CacheConfig,
    *,
    device: str,
    available: int,
    host_available: int,
    weights: int,
    activations: int,
    max_rows: int,
    max_model_len: int,
    max_batch_tokens: int,
) -> MemoryPlan:
    """Plan the cache. `available` is the number of bytes free once the weights are loaded.

    Raises `out_of_memory` if there is no room for one sequence's state or three pages.
    """
    notes: list[str] = []
    rows = max_rows * (max_model_len + 1) * 4 + max_rows * 4 * sum(
        -(-max_model_len // s.page_tokens) if s.kind == "paged" else 1 for s in specs
    )
    shares = _GroupShares(specs, max_model_len, max_rows, max_batch_tokens)
    page = shares.page_bytes
    slot = sum(unit_bytes(s) for s in specs if s.kind == "state")
    size = specs[0].page_tokens
    budget = _cache_budget(specs, config, device, available - activations - rows, max_model_len, shares)
    num_slots = _num_slots(config, budget, page, slot, max_rows, -(-min(max_model_len, CONVERSATION_TOKENS) // size))
    num_pages = config.num_pages or 0
    if page and not num_pages:
        num_pages = shares.max_pages(budget - num_slots * slot)
    if slot and num_slots < MIN_SLOTS:
        raise QuireError(
            "out_of_memory",
            f"The cache has no room: {_bytes(max(0, available))} are free on {device}, one request's recurrent state "
            f"takes {_bytes(slot)}.",
            "Free memory, choose a smaller model, or lower max_batch_tokens.",
        )
    if slot and num_slots - 1 < max_rows:
        notes.append(
            f"{num_slots - 1} state slots limit the requests that run at once to fewer than max_rows={max_rows}"
        )
    if page and num_pages < 3:
        raise QuireError(
            "out_of_memory",
            f"The cache has no room: {_bytes(max(0, available))} are free on {device}, one page of {size} tokens "
            f"takes {_bytes(page)}.",
            "Free memory, choose a smaller model, or lower max_rows and max_batch_tokens.",
        )
    windowed_only = all(s.window is not None for s in specs if s.kind == "paged")
    capacity = max_model_len if windowed_only else (num_pages - 1) * size
    if capacity < max_model_len:
        notes.append(f"the cache holds {capacity} tokens, so no sequence can reach max_model_len={max_model_len}")
    for spec in specs:
        need = _least_pages(spec)
        if spec.kind == "paged" and spec.window is not None and num_pages < min(need, -(-max_model_len // size) + 1):
            what = f"A window of {spec.window} tokens needs {need} pages, there are {num_pages}."
            raise QuireError("out_of_memory", what, "Raise cache_memory or num_pages, or free memory.")
    host_shares = _GroupShares(specs, max_model_len, max_rows=1)  # swapped-out requests have no steps in flight
    host = _host_units(specs, config, device, host_available, slot, num_pages, max_rows, host_shares)
    units = tuple(shares.pages(s, num_pages) if s.kind == "paged" else num_slots for s in specs)
    return MemoryPlan(
        device,
        available,
        weights,
        activations,
        rows,
        tuple(specs),
        units,
        host,
        min(capacity, max_model_len),
        max_model_len,
        tuple(notes),
    )


class _GroupShares:
    """Divides pages among a model's groups.

    A window releases the pages it has passed, so its pool is smaller, in proportion to what a conversation needs of it.
    It is never too small for all rows at once and the steps in flight.
    """

    def __init__(self, specs: list[CacheSpec], max_model_len: int, max_rows: int, max_batch_tokens: int = 0):
        self._paged = [spec for spec in specs if spec.kind == "paged"]
        self._all_windowed = all(spec.window is not None for spec in self._paged)
        size = specs[0].page_tokens
        self.conversation_pages = -(-min(max_model_len, CONVERSATION_TOKENS) // size)
        self._pages_in_flight = STEPS_PER_WINDOW_POOL * -(-max_batch_tokens // size)
        self._max_rows = max_rows

    def pages(self, spec: CacheSpec, num_pages: int) -> int:
        """Return the pages of this group when a group of full attention has `num_pages`."""
        if spec.window is None or self._all_windowed:
            return num_pages
        least = _least_pages(spec)
        share = -(-num_pages * CONVERSATION_WINDOWS * least // self.conversation_pages)
        return min(num_pages, max(share, self._pages_in_flight + self._max_rows * least))

    def size(self, num_pages: int) -> int:
        return sum(unit_bytes(spec) * self.pages(spec, num_pages) for spec in self._paged)

    def max_pages(self, budget: int) -> int:
        """Return the largest number of pages whose groups fit into `budget` bytes."""
        if not self._paged:
            return 0
        few, many = 0, budget // min(unit_bytes(spec) for spec in self._paged) + 1
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (middle, many) if self.size(middle) <= budget else (few, middle)
        return few

    @property
    def page_bytes(self) -> int:
        """Bytes per page over all groups, averaged over a large cache."""
        many = 1 << 20
        return -(-self.size(many) // many)


def _least_pages(spec: CacheSpec) -> int:
    """Return the fewest pages of a windowed group with which a sequence can run."""
    return -(-(spec.window or 0) // spec.page_tokens) + 3


def shrink_cache(plan: MemoryPlan, wanted: MemoryPlan, share: float) -> MemoryPlan:
    """Return the plan with this share of its pages, after an allocation failed; a note names the size `wanted`.

    Raises `out_of_memory` if a group would have too few pages to run.
    """
    size = plan.specs[0].page_tokens
    units = tuple(int(n * share) if s.kind == "paged" else n for s, n in zip(plan.specs, plan.num_units, strict=True))
    paged = [(s, n) for s, n in zip(plan.specs, units, strict=True) if s.kind == "paged"]
    if units == plan.num_units or any(n < _least_pages(s) for s, n in paged):
        what = f"The cache could not be allocated on {plan.device}: {_bytes(wanted.cache)} were planned."
        raise QuireError("out_of_memory", what, "Free memory, or lower cache_memory.")
    capacity = min([plan.capacity_tokens, *((n - 1) * size for s, n in paged if s.window is None)])
    smaller = replace(plan, num_units=units, capacity_tokens=capacity)
    note = f"{_bytes(smaller.cache)} of the {_bytes(wanted.cache)} planned could be allocated"
    return replace(smaller, notes=(*wanted.notes, note))


def _cache_budget(
    specs: list[CacheSpec], config: CacheConfig, device: str, free: int, max_model_len: int, shares: _GroupShares
) -> int:
    if config.cache_memory is not None:
        return config.cache_memory
    budget = int(free * config.memory_fraction)
    if device == "cpu":
        slots = (1 + CONVERSATION_SLOTS) * sum(unit_bytes(s) for s in specs if s.kind == "state")
        one_sequence = shares.size(-(-max_model_len // specs[0].page_tokens) + 2) + slots
        budget = min(budget, max(CPU_CACHE_LIMIT, one_sequence))
    return budget


def _num_slots(config: CacheConfig, budget: int, page: int, slot: int, max_rows: int, conversation_pages: int) -> int:
    """Return the number of state slots including scratch; snapshots use those that running requests do not need."""
    if not slot or config.num_slots is not None:
        return (config.num_slots or 0) if slot else 0
    if config.num_pages is not None:
        return 1 + 2 * max_rows + 8
    most = 1 + MAX_SLOTS_PER_ROW * max_rows
    if not page:
        return min(budget // slot, most)
    conversation = conversation_pages * page + CONVERSATION_SLOTS * slot
    num_slots = min(1 + budget * CONVERSATION_SLOTS // conversation, most)
    return max(num_slots, MIN_SLOTS) if budget >= MIN_SLOTS * (slot + page) else num_slots


def _host_units(
    specs: list[CacheSpec],
    config: CacheConfig,
    device: str,
    available: int,
    slot: int,
    num_pages: int,
    max_rows: int,
    shares: _GroupShares,
) -> tuple[int, ...] | None:
    """Return the units in host memory, for preempted requests and evicted blocks; None: there is no room.

    Without `host_memory` they are at most as many pages as the device has.
    """
    budget = config.host_memory
    if budget is None:
        budget = min(int(available * HOST_SHARE), HOST_LIMITS.get(device, GIB))
    num_slots = min(max_rows + 1, budget // (2 * slot)) if slot else 0
    if slot and config.host_memory is not None:
        conversation = shares.conversation_pages * shares.page_bytes + CONVERSATION_SLOTS * slot
        num_slots = max(num_slots, min(budget * CONVERSATION_SLOTS // conversation, budget // (2 * slot)))
    pages = shares.max_pages(budget - num_slots * slot)
    if config.host_memory is None:
        pages = min(num_pages, pages)
    units = tuple(shares.pages(s, pages) if s.kind == "paged" else num_slots for s in specs)
    return units if all(n >= 2 for n in units) else None


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
