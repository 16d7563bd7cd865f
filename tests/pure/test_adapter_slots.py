"""Slots of adapters: least recently used first, never one in use, and nothing lost after failed steps."""

from __future__ import annotations

import os
import random

import pytest

from quire.engine.adapters.slots import AdapterSlots
from quire.types import Plan, QuireError, Request, SamplingParams

SEED = int(os.environ.get("TEST_SEED", "7"))


def request_with(name: str, adapter: str | None) -> Request:
    return Request(name, [1], 1, SamplingParams(), 2, adapter=adapter)


def test_the_least_recently_used_adapter_leaves_its_slot_first() -> None:
    slots = AdapterSlots(2, ["a", "b", "c"])
    for name in ("a", "b", "a"):
        slots.take(name, Plan(1))
        slots.release(name)
    plan = Plan(2)
    assert slots.take("c", plan) == 1  # that of b
    assert [(load.slot, load.adapter) for load in plan.adapters] == [(1, "c")]
    assert slots.resident == ["a", "c"]


def test_an_adapter_in_use_keeps_its_slot() -> None:
    slots = AdapterSlots(1, ["a", "b"])
    assert slots.take(None, Plan(1)) == -1
    assert slots.take("a", Plan(1)) == slots.take("a", Plan(1)) == 0
    assert not slots.has_room("b") and slots.has_room("a") and slots.has_room(None)
    assert not slots.release("a") and not slots.has_room("b")
    assert slots.release("a") and slots.has_room("b")


def test_an_unknown_adapter_is_an_error() -> None:
    with pytest.raises(QuireError, match="no adapter with the digest"):
        AdapterSlots(1, ["a"]).check_known("b")


def test_random_moves_keep_the_slots_consistent() -> None:
    print(f"TEST_SEED={SEED}")
    rng = random.Random(SEED)
    known = [f"adapter {i}" for i in range(6)]
    slots = AdapterSlots(3, known)
    device: dict[int, str] = {}  # what each slot holds, by the plans that ran
    running: list[tuple[Request, int]] = []
    failed: list[Plan] = []
    for step in range(2000):
        plan = Plan(step + 1)
        adapter = rng.choice([None, *known])
        if slots.has_room(adapter) and rng.random() < 0.6:
            running.append((request_with(f"r{step}", adapter), slots.take(adapter, plan)))
        elif running:
            request, _ = running.pop(rng.randrange(len(running)))
            slots.release(request.adapter)
        slots.finish(plan)
        if rng.random() < 0.1:
            slots.load_again(plan.adapters)
            failed.append(plan)
        else:
            device.update({load.slot: load.adapter for load in plan.adapters})
            failed.clear()
        idle = [name for name in slots.known if name not in {r.adapter for r, _ in running}]
        if idle and rng.random() < 0.02:
            slots.forget(idle[0])
            slots.known.add(idle[0])
        slots.check([request for request, _ in running])
        if not failed:
            for request, slot in running:
                assert slot < 0 or device[slot] == request.adapter
    assert slots.empty_copy().resident == []
