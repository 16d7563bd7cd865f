"""Items that wait for a step: none leaves before its step has committed, and all leave in order."""

from __future__ import annotations

import random
import time

import pytest

from quire.types.step_queue import StepQueue


def test_items_leave_in_order_once_their_step_has_committed() -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    rng = random.Random(seed)
    queue: StepQueue[int] = StepQueue()
    put: dict[int, int] = {}
    left: list[int] = []
    committed = 0
    for item in range(500):
        put[item] = committed + rng.randint(1, 3)
        queue.put(item, put[item])
        if rng.random() < 0.3:
            committed += 1
            taken = queue.take_committed(committed)
            assert all(put[one] <= committed for one in taken)
            left += taken
        queue.check(committed)
        assert left + list(queue) == list(range(item + 1))
    left += queue.take_committed(committed + 3)
    assert left == list(range(500)) and not queue


def test_an_item_waits_at_least_as_long_as_the_one_before_it() -> None:
    queue: StepQueue[str] = StepQueue()
    queue.put("late", 5)
    queue.put("early", 2)
    assert queue.take_committed(4) == [] and queue.take_committed(5) == ["late", "early"]


def test_an_item_that_should_have_left_is_noticed() -> None:
    queue: StepQueue[str] = StepQueue()
    queue.put("row", 3)
    queue.check(2)
    with pytest.raises(AssertionError, match="after its step"):
        queue.check(3)
    queue.clear()
    queue.check(3)
