"""The device's rows: which are free, which are in limbo, and which the device must be told are free again.

A row that is given back may still be read by steps in flight; it goes to the next request only when they have
committed. The scheduler is the only caller.
"""

from __future__ import annotations

from quire.types.step_queue import StepQueue


class RowPool:
    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))  # a stack: low numbers first
        self._pending_free: StepQueue[int] = StepQueue()
        self._unannounced: list[int] = []  # given back since the last plan

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def release_after(self, row: int, fence: int, settled: int) -> None:
        """Free once step `fence` has committed; `settled`: the last step that has."""
        self._unannounced.append(row)
        self._pending_free.put(row, fence)
        self.settle(settled)

    def settle(self, step: int) -> None:
        """Every step up to this one has committed."""
        self._free += self._pending_free.take_committed(step)

    def take_freed(self) -> list[int]:
        """For the next plan: the device forgets who had these."""
        freed, self._unannounced = self._unannounced, []
        return freed

    def announce_again(self, rows: list[int]) -> None:
        """The plan that said so never ran."""
        self._unannounced.extend(rows)

    def announce_all(self) -> None:
        """The device may know of any row, whatever it was told."""
        self._unannounced = list(range(self._num_rows))

    def check(self, taken: list[int]) -> None:
        everywhere = taken + self._free + list(self._pending_free)
        assert sorted(everywhere) == list(range(self._num_rows)), "a row was lost or given out twice"
