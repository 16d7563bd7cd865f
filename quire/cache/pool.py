"""Reference counts of one group's units: pages of a paged group, or slots of a state group.

A unit is free, or referenced by leases and at most once by the prefix tree. Unit 0 is scratch and is never taken:
padded tokens and absent pages point at it. `UnitLedger` owns the pools.
"""

from __future__ import annotations

from collections.abc import Iterable

FREE = 0


class Pool:
    """One group's units with their reference counts."""

    def __init__(self, num_units: int):
        if num_units < 2:
            raise ValueError("a pool needs at least one unit beside the scratch unit")
        self.num_units = num_units
        self._refs = [FREE] * num_units
        self._free = list(range(num_units - 1, 0, -1))  # a stack: low numbers first, then recently freed ones

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refs(self, unit: int) -> int:
        return self._refs[unit]

    def take(self) -> int:
        """Return a free unit with one reference. The caller has checked `num_free`."""
        unit = self._free.pop()
        self._refs[unit] = 1
        return unit

    def take_free(self, count: int) -> list[int]:
        """Return all free units, at most `count`, in the order in which `take` returns them."""
        first = max(0, len(self._free) - count)
        units = self._free[first:][::-1]
        del self._free[first:]
        for unit in units:
            self._refs[unit] = 1
        return units

    def share(self, units: Iterable[int]) -> int:
        """Add a reference to each unit; return how many of them had exactly one before."""
        refs, num_lone = self._refs, 0
        for unit in units:
            count = refs[unit]
            assert count > FREE, f"unit {unit} is free and can't be shared"
            refs[unit] = count + 1
            num_lone += count == 1
        return num_lone

    def drop(self, units: Iterable[int]) -> list[int]:
        """Drop a reference of each unit; return the units that have one left."""
        refs, lone = self._refs, []
        for unit in units:
            left = refs[unit] - 1
            assert left >= FREE, f"unit {unit} was dropped once too often"
            refs[unit] = left
            if left == FREE:
                self._free.append(unit)
            elif left == 1:
                lone.append(unit)
        return lone

    def check(self, owners: dict[int, int]) -> None:
        """Assert that each unit is free or has the number of references that `owners` names for it."""
        free = set(self._free)
        assert len(free) == len(self._free), "a unit is in the free list twice"
        assert 0 not in free and 0 not in owners, "the scratch unit was handed out"
        for unit in range(1, self.num_units):
            expected = owners.get(unit, FREE)
            assert self._refs[unit] == expected, f"unit {unit}: {self._refs[unit]} references, {expected} owners"
            assert (unit in free) == (expected == FREE), f"unit {unit}: free list and references disagree"
