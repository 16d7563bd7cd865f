"""The free rows of the device, those that are pending-free, and those that the next plan must report as freed.

Steps in flight may still read a released row, so it is assigned again only after they have committed. The request table
is the only caller.
"""

from __future__ import annotations

from quire.types.step_queue import StepQueue


class RowPool:
    """Free and pending-free rows of the device."""

    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))  # a stack: low numbers first
        self._pending_free: StepQueue[int] = StepQueue()
        self._unannounced: list[int] = []  # rows released since the last plan

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def release_after(self, row: int, fence: int, settled: int) -> None:
        """Release a row once step `fence` has committed; `settled` is the last step that has."""
        self._unannounced.append(row)
        self._pending_free.put(row, fence)
        self.settle(settled)

    def settle(self, step: int) -> None:
        """Free the rows that waited for steps up to `step`, which have committed."""
        self._free += self._pending_free.take_committed(step)

    def take_freed(self) -> list[int]:
        """Return the rows that the next plan reports to the device as freed."""
        freed, self._unannounced = self._unannounced, []
        return freed

    def announce_again(self, rows: list[int]) -> None:
        """Report these rows again, since the plan that reported them never ran."""
        self._unannounced.extend(rows)

    def announce_all(self) -> None:
        """Report every row as freed, since the state of the device is unknown."""
        self._unannounced = list(range(self._num_rows))

    def check(self, taken: list[int]) -> None:
        everywhere = taken + self._free + list(self._pending_free)
        assert sorted(everywhere) == list(range(self._num_rows)), "a row is lost or assigned twice"
