"""Statistics for reports: percentiles, histograms, medians over runs, and gates that a figure must meet.

Benchmarks call these functions after their measurement. Reports are dicts of plain numbers; a figure without data,
such as the inter-token latency of one-token answers, is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

Report = dict[str, Any]

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which this share of the sorted values lies, by linear interpolation."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def percentiles(values: Sequence[float]) -> Report | None:
    if not values:
        return None
    ordered = sorted(values)
    return {name: percentile(ordered, share) for name, share in SHARES.items()}


def distribution(values: Sequence[int]) -> Report | None:
    """Return mean, maximum and a histogram over ranges that double: 0, 1, 2, 3 to 4, 5 to 8, …"""
    if not values:
        return None
    counts = Counter((value - 1).bit_length() if value else -1 for value in values)
    histogram = [_bucket(power, counts[power]) for power in range(min(counts), max(counts) + 1)]
    return {"mean": fmean(values), "max": max(values), "histogram": histogram}


def _bucket(power: int, num_steps: int) -> Report:
    low, high = ((1 << power >> 1) + 1, 1 << power) if power >= 0 else (0, 0)
    return {"low": low, "high": high, "steps": num_steps}


def median_of(records: Sequence[Any]) -> Any:
    """Return the median of each number that all records hold, at any depth; other values are left out."""
    first = records[0]
    if isinstance(first, dict) and all(isinstance(record, dict) for record in records):
        merged = {key: median_of([record.get(key) for record in records]) for key in first}
        return {key: value for key, value in merged.items() if value is not None}
    if all(isinstance(record, (int, float)) and not isinstance(record, bool) for record in records):
        return median(records)
    return None


@dataclass(frozen=True, slots=True)
class Bar:
    """A gate: the bound that a figure must reach or must not exceed."""

    name: str
    value: float
    bar: float
    sense: Literal["at least", "at most"]

    @property
    def passed(self) -> bool:
        return self.value >= self.bar if self.sense == "at least" else self.value <= self.bar

    def to_report(self) -> Report:
        return {"name": self.name, "value": self.value, "bar": self.bar, "sense": self.sense, "pass": self.passed}
