"""A queue of items that may be used again only once a step has committed.

Steps run and commit in order, so items that wait for them leave the queue in the order in which they came. Rows of the
device, units of the cache and the flight record share it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class StepQueue(Generic[T]):
    """Items with the step that each waits for, in ascending order of steps."""

    def __init__(self) -> None:
        self._items: deque[tuple[int, T]] = deque()

    def __bool__(self) -> bool:
        return bool(self._items)

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self._items)

    def put(self, item: T, step: int) -> None:
        """Add an item that waits for `step`, or for the last item's step where that is later."""
        if self._items:
            step = max(step, self._items[-1][0])
        self._items.append((step, item))

    def take_committed(self, step: int) -> list[T]:
        """Remove and return the items that wait for `step` or an earlier one, in order."""
        items = self._items
        taken = []
        while items and items[0][0] <= step:
            taken.append(items.popleft()[1])
        return taken

    def clear(self) -> None:
        self._items.clear()

    def check(self, step: int) -> None:
        """Assert that the items are in order, and that none of them waits for `step` or an earlier one."""
        steps = [waits_for for waits_for, _ in self._items]
        assert steps == sorted(steps) and all(s > step for s in steps), f"an item stayed queued after its step: {steps}"
