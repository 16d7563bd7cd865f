"""A short stretch of fuzzing, and everything it ever found, tried again. `make fuzz` goes on for longer."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")

from tests.fuzz.amplify import Amplification
from tests.fuzz.targets import TARGETS, Fuzzed, try_case

FINDINGS = sorted(
    path
    for path in (Path(__file__).parents[1] / "fuzz" / "findings").iterdir()
    if path.name.startswith(tuple(f"{kind.name}-" for kind in TARGETS))  # others need torch: tests/cpu
)
CASES = {"gguf": 60, "safetensors": 60, "tokenizer": 40, "http": 150}


@pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.name)
def test_random_input_is_taken_or_refused(kind: type[Fuzzed], tmp_path: Path) -> None:
    seed = os.environ.get("TEST_SEED", "0")
    print(f"TEST_SEED={seed}")
    target, rng = kind(tmp_path), random.Random(f"{seed}/{kind.name}")
    for _ in range(CASES.get(kind.name, 500)):
        case = target.make(rng)
        assert try_case(target, case) is None, case


def test_no_body_costs_more_than_its_bytes_allow(tmp_path: Path) -> None:
    seed = os.environ.get("TEST_SEED", "0")
    print(f"TEST_SEED={seed}")
    target, rng = Amplification(tmp_path), random.Random(f"{seed}/amplify")
    try:
        for _ in range(120):
            case = target.make(rng)
            assert try_case(target, case) is None, case[:2000]
    finally:
        target.close()


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.name)
def test_what_was_found_once_stays_mended(path: Path, tmp_path: Path) -> None:
    (kind,) = [kind for kind in TARGETS if path.name.startswith(kind.name + "-")]
    assert try_case(kind(tmp_path), path.read_bytes()) is None
