"""Units on their way to the host: nobody waits for them but who needs them, and none gets lost or mixed up.

A machine without a GPU can't be late, so the store's `HostCopy` is a stand-in that arrives when the test says so. It
counts who waited. `tests/gpu/test_syncs.py` asks CUDA itself.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.runtime import store as store_module
from quire.runtime.store import CacheStore, CorruptUnits
from quire.types import CacheSpec, Copy, CopyKind, SamplingParams
from tests.cpu.rig import load, make_engine, make_request
from tests.cpu.tiny_models import make_tiny

CPU = torch.device("cpu")
NUM_UNITS, NUM_HOST = 8, 6
SPECS = [
    CacheSpec("pages", "paged", (0, 1, 2), (2, 4), "float32", page_tokens=4),
    CacheSpec("bytes", "paged", (0,), (1, 8), "float8_e4m3fn", page_tokens=4),
    CacheSpec("state", "state", (3, 4), (5,), "float32"),
]


class Late:
    """What the device had at that moment; there once `arrive` was called, or after `polls` questions."""

    polls: int | None = None
    all: list[Late]
    num_waits: int

    def __init__(self, tensor: Tensor):
        self.num_bytes = tensor.nbytes
        self._tensor = tensor.clone()
        self._arrived, self._asked = False, 0
        Late.all.append(self)

    def arrive(self) -> None:
        self._arrived = True

    def is_done(self) -> bool:
        self._asked += 1
        return self._arrived or (self.polls is not None and self._asked > self.polls)

    def wait(self) -> Tensor:
        Late.num_waits += not self.is_done()
        self._arrived = True
        return self._tensor


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    Late.all, Late.num_waits = [], 0
    monkeypatch.setattr(store_module, "HostCopy", Late)


def make_store(**options: Any) -> CacheStore:
    count = len(SPECS)
    return CacheStore(SPECS, [NUM_UNITS] * count, [NUM_HOST] * count, CPU, **options)


def fill(store: CacheStore, group: int, unit: int, value: float) -> None:
    """What a later step would write."""
    device = store.tensors[SPECS[group].group]
    device.select(2 if SPECS[group].kind == "paged" else 1, unit).copy_(torch.tensor(value))


def read(store: CacheStore, group: int, unit: int) -> set[float]:
    device = store.tensors[SPECS[group].group].float()
    return set(device.select(2 if SPECS[group].kind == "paged" else 1, unit).flatten().tolist())


def out(group: int, source: int, target: int) -> Copy:
    return Copy(CopyKind.OUT, group, source, target)


def back(group: int, source: int, target: int) -> Copy:
    return Copy(CopyKind.IN, group, source, target)


@pytest.mark.parametrize("group", range(len(SPECS)), ids=lambda group: SPECS[group].group)
def test_nobody_waits_for_what_leaves_and_the_next_copies_find_it_there(group: int) -> None:
    store = make_store()
    fill(store, group, 1, 3.0)
    fill(store, group, 2, 4.0)
    store.apply([out(group, 1, 5), out(group, 2, 0)])
    fill(store, group, 1, 9.0)  # the device goes on with the unit
    store.apply([])
    assert len(store._pending) == 1 and not Late.num_waits
    Late.all[0].arrive()
    store.apply([])
    assert not store._pending
    store.apply([back(group, 5, 7), back(group, 0, 1)])
    assert (read(store, group, 7), read(store, group, 1)) == ({3.0}, {4.0}) and not Late.num_waits


def test_what_is_needed_is_waited_for_and_what_left_later_is_not() -> None:
    store = make_store()
    for group, unit in ((0, 1), (2, 1), (0, 2), (0, 3), (2, 2)):
        fill(store, group, unit, 10.0 * group + unit)
        store.apply([out(group, unit, unit)])
    assert not Late.num_waits
    store.apply([back(0, 2, 7)])
    assert read(store, 0, 7) == {2.0} and Late.num_waits == 3, "the two before it lie before it"
    assert [(pending.group, pending.targets) for pending in store._pending] == [(0, [3]), (2, [2])]
    store.apply([back(2, 1, 5), back(0, 1, 6)])
    assert (read(store, 2, 5), read(store, 0, 6)) == ({21.0}, {1.0}) and Late.num_waits == 3, "they are placed"


def test_who_arrives_first_does_not_overtake_and_the_last_to_leave_has_the_unit() -> None:
    """The first owner ended while its unit was under way, and somebody else has it now."""
    store = make_store()
    for unit, value in ((1, 3.0), (2, 4.0)):
        fill(store, 0, unit, value)
        store.apply([out(0, unit, 5)])
    Late.all[1].arrive()
    store.apply([])
    assert len(store._pending) == 2, "placed in the order in which they left"
    Late.all[0].arrive()
    store.apply([back(0, 5, 7)])
    assert read(store, 0, 7) == {4.0} and not Late.num_waits
    fill(store, 0, 1, 5.0)
    store.apply([out(0, 1, 5)])  # over one that has been placed
    store.apply([back(0, 5, 7)])
    assert read(store, 0, 7) == {5.0} and Late.num_waits == 1


def test_so_much_may_be_under_way_and_then_the_oldest_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store()
    size = store.tensors["pages"].nbytes // NUM_UNITS
    monkeypatch.setattr(store_module, "MAX_PENDING_BYTES", 2 * size + 1)
    for unit in range(4):
        fill(store, 0, unit, unit + 1.0)
        store.apply([out(0, unit, unit)])
        assert Late.num_waits == max(0, unit - 1) and len(store._pending) == min(unit + 1, 2)
    monkeypatch.setattr(store_module, "MAX_PENDING_BYTES", size - 1)
    store.apply([out(0, 5, 4)])  # more than may be under way at all goes alone
    assert [pending.targets for pending in store._pending] == [[4]]
    store.apply([back(0, unit, unit + 4) for unit in range(4)])
    assert [read(store, 0, unit + 4) for unit in range(4)] == [{1.0}, {2.0}, {3.0}, {4.0}]


def test_many_units_leave_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs its size in the device's memory for a moment."""
    store = make_store()
    monkeypatch.setattr(store_module, "MAX_RUN_BYTES", 2 * store.tensors["pages"].nbytes // NUM_UNITS)
    store.apply([out(0, unit, unit) for unit in range(5)])
    assert [pending.targets for pending in store._pending] == [[0, 1], [2, 3], [4]]


def test_a_unit_that_changed_on_the_host_fails_its_copy_and_loses_nobody_elses() -> None:
    store = make_store()
    for unit in (1, 2):
        fill(store, 0, unit, float(unit))
    store.apply([out(0, 1, 1)])
    Late.all[0].arrive()
    store.apply([out(0, 2, 2)])
    store._host[0][:, :, 1] += 1
    fill(store, 0, 7, 9.0)
    with pytest.raises(CorruptUnits, match="host unit 1 of group 0"):
        store.apply([back(0, 1, 7)])
    assert read(store, 0, 7) == {9.0} and len(store._pending) == 1
    store.apply([back(0, 2, 7)])
    assert read(store, 0, 7) == {2.0}


def test_without_memory_on_the_host_the_copy_that_needs_it_fails_and_the_next_may_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = make_store()
    zeros = store_module._zeros
    monkeypatch.setattr(store_module, "_zeros", lambda *args: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        store.apply([out(0, 1, 1)])
    store.apply([])
    monkeypatch.setattr(store_module, "_zeros", zeros)
    fill(store, 0, 1, 6.0)
    store.apply([out(0, 1, 1), back(0, 1, 2)])
    assert read(store, 0, 2) == {6.0}


@pytest.mark.parametrize("seed", range(6))
def test_any_copies_at_any_pace_are_those_of_a_device_that_is_never_late(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    unit_bytes = store_module._unit_bytes(SPECS[0])
    monkeypatch.setattr(store_module, "MAX_RUN_BYTES", rng.choice([1, 2 * unit_bytes, 1 << 26]))
    monkeypatch.setattr(store_module, "MAX_PENDING_BYTES", rng.choice([unit_bytes, 4 * unit_bytes, 1 << 29]))
    store = make_store(checksums=rng.random() < 0.8)
    device: dict[tuple[int, int], float] = {}
    host: dict[tuple[int, int], float] = {}
    for _ in range(150):
        copies: list[Copy] = []
        for _ in range(rng.randrange(5)):
            kind = rng.choice([CopyKind.OUT, CopyKind.OUT, CopyKind.IN, CopyKind.DEVICE, CopyKind.ZERO])
            group = rng.randrange(len(SPECS))
            source, target = rng.randrange(NUM_HOST), rng.randrange(NUM_HOST)
            targets = {copy.target for copy in copies if (copy.kind, copy.group) == (kind, group)}
            if target in targets or (kind is CopyKind.IN and (group, source) not in host):
                continue  # no plan writes a unit twice, or reads what never left
            copies.append(Copy(kind, group, source, target))
            there = host if kind is CopyKind.IN else device
            value = 0.0 if kind is CopyKind.ZERO else there.get((group, source), 0.0)
            (host if kind is CopyKind.OUT else device)[group, target] = value
        store.apply(copies)
        group, unit, value = rng.randrange(len(SPECS)), rng.randrange(NUM_UNITS), float(rng.randrange(1, 9))
        fill(store, group, unit, value)
        device[group, unit] = value
        for fetch in Late.all:
            if rng.random() < 0.1:
                fetch.arrive()
        for key, expected in device.items():
            assert read(store, *key) == {expected}


@pytest.mark.parametrize("polls", [0, 1, 3, 1000])
def test_an_engine_that_swaps_says_the_same_however_late_its_units_arrive(
    polls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Late, "polls", polls)
    tiny = load(make_tiny("qwen3", tmp_path)[1])
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    said = []
    for pool in ({"num_pages": 600}, {"num_pages": 24, "preemption": "swap", "host_memory": 1 << 20}):
        engine = make_engine(tiny, max_rows=6, depth=2, late=True, prefix_cache=False, **pool)
        for index in range(6):
            engine.add(make_request(f"r{index}", [(5 * index + j) % 200 for j in range(9)], params))
        tokens: dict[str, list[int]] = {}
        for delta in engine.run_until_idle():
            assert delta.error is None, delta.error
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        said.append(tokens)
    assert engine.scheduler.cache.stats.swapped_in and said[0] == said[1]
