"""The arithmetic of benchmark reports."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from statistics import quantiles

import pytest

from quire.bench.stats import Bar, distribution, median_of, percentile, percentiles

SEED = int(os.environ.get("TEST_SEED", "7"))


def test_percentiles_of_a_known_list() -> None:
    values = [float(value) for value in range(101)]
    random.Random(1).shuffle(values)
    assert percentiles(values) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}


def test_percentiles_lie_on_the_line_between_neighbours() -> None:
    assert percentile([10.0, 20.0], 0.5) == 15.0
    assert percentile([10.0, 20.0], 0.9) == pytest.approx(19.0)
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert percentiles([]) is None


def test_percentiles_against_the_standard_library() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for _ in range(50):
        values = sorted(rng.expovariate(1) for _ in range(rng.randint(2, 60)))
        expected = quantiles(values, n=100, method="inclusive")
        for place in (1, 50, 90, 99):
            assert percentile(values, place / 100) == pytest.approx(expected[place - 1])


def test_distribution_counts_every_step_once() -> None:
    report = distribution([1, 1, 2, 3, 4, 5, 8, 9, 256, 0])
    assert report is not None
    filled = {(b["low"], b["high"]): b["steps"] for b in report["histogram"] if b["steps"]}
    assert filled == {(0, 0): 1, (1, 1): 2, (2, 2): 1, (3, 4): 2, (5, 8): 2, (9, 16): 1, (129, 256): 1}
    assert report["max"] == 256 and report["mean"] == 28.9
    edges = [(b["low"], b["high"]) for b in report["histogram"]]
    assert all(low == before + 1 for (_, before), (low, _) in pairwise(edges))
    assert distribution([]) is None


def test_median_of_nested_records() -> None:
    records = [
        {"tps": 1.0, "ttft": {"p50": 5}, "itl": None, "histogram": [1], "name": "a", "flag": True},
        {"tps": 9.0, "ttft": {"p50": 7}, "itl": {"p50": 1}, "histogram": [2], "name": "b", "flag": True},
        {"tps": 2.0, "ttft": {"p50": 6}, "itl": {"p50": 2}, "histogram": [3], "name": "c", "flag": True},
    ]
    assert median_of(records) == {"tps": 2.0, "ttft": {"p50": 6}}


def test_bars_know_their_direction() -> None:
    assert Bar("x", 1.2, 1.2, "at most").passed and not Bar("x", 1.21, 1.2, "at most").passed
    assert Bar("x", 4.0, 4.0, "at least").passed and not Bar("x", 3.9, 4.0, "at least").passed
    assert not Bar("x", float("nan"), 4.0, "at least").passed
    report = {"name": "x", "value": 5.0, "bar": 4.0, "sense": "at least", "pass": True}
    assert Bar("x", 5.0, 4.0, "at least").to_report() == report
