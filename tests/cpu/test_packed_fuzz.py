"""A short stretch of fuzzing of packed checkpoints, and what it ever found. `make fuzz` goes on for longer."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.fuzz.packed import PackedCheckpoint
from tests.fuzz.targets import try_case

FINDINGS = sorted((Path(__file__).parents[1] / "fuzz" / "findings").glob("packed-*"))


def test_random_files_are_taken_or_refused(tmp_path: Path) -> None:
    seed = os.environ.get("TEST_SEED", "0")
    print(f"TEST_SEED={seed}")
    target, rng = PackedCheckpoint(tmp_path), random.Random(f"{seed}/packed")
    for _ in range(1000):
        case = target.make(rng)
        assert try_case(target, case) is None, case


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.name)
def test_what_was_found_once_stays_mended(path: Path, tmp_path: Path) -> None:
    assert try_case(PackedCheckpoint(tmp_path), path.read_bytes()) is None
