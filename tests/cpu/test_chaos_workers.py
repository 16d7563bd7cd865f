"""The chaos gate's wrapper around workers: it spoils what it says, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.chaos.engine_process import FaultyWorkers
from quire.chaos.faults import ArmedFaults, poison_seed
from quire.types import SamplingParams
from tests.cpu.rig import load, make_engine, make_request
from tests.cpu.tiny_models import make_tiny
from tests.pure.drafting import RandomDrafter

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
POISONED = 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_tiny("llama", tmp_path_factory.mktemp("tiny"))[1])


def prompt(index: int) -> list[int]:
    return [(7 * index + j) % 200 + 3 for j in range(9 + index)]


def test_a_poisoned_request_ends_alone_though_rows_have_drafts(tiny: Any) -> None:
    drafter = RandomDrafter(random.Random(3), silent=0.3, vocab=200)
    engine = make_engine(tiny, drafter=drafter)
    engine.workers = FaultyWorkers(engine.workers, ArmedFaults())
    for index in range(5):
        engine.add(make_request(f"r{index}", prompt(index), GREEDY))
    errors: dict[str, str | None] = {}
    added = False  # it comes when others have drafts
    while engine.has_work:
        if drafter.num_drafts and not added:
            poisoned = make_request(f"r{POISONED}", prompt(POISONED), GREEDY)
            poisoned.seed = poison_seed("nonfinite")
            engine.add(poisoned)
            added = True
        for delta in engine.turn():
            if delta.finish_reason is not None:
                errors[delta.request_id] = delta.error_code
    assert errors == {f"r{index}": "bad_logits" if index == POISONED else None for index in range(6)}


@pytest.mark.parametrize("checksums", [True, False])
def test_spoiled_host_pages_are_really_spoiled(tiny: Any, checksums: bool) -> None:
    """With checksums the pages are computed again; without them the spoiled bytes change the tokens."""
    options: dict[str, Any] = {"num_pages": 24, "max_rows": 6, "prefix_cache": False, "host_memory": 1 << 20}
    options |= {"preemption": "swap", "swap_checksums": checksums}
    outputs = []
    for spoil in (False, True):
        engine = make_engine(tiny, **options)
        faults = ArmedFaults()
        engine.workers = FaultyWorkers(engine.workers, faults)
        for index in range(6):
            engine.add(make_request(f"r{index}", prompt(index), GREEDY))
        tokens: dict[str, list[int]] = {}
        while engine.has_work:
            for delta in engine.turn():
                assert delta.error is None, delta.error
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if spoil and engine.scheduler.stats.swaps:
                faults.arm("host_page")
                spoil = False
        outputs.append((tokens, dict(faults.happened)))
    (expected, none), (got, happened) = outputs
    assert (none, happened) == ({}, {"host_page": 1})
    assert (got == expected) is checksums
