"""Tests stores below host memory on real models: cold, warm, after a restart, and across page sizes and engines the
tokens are those of `transformers`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.engine.loop import Engine
from tests.cpu.families.harness import GREEDY, VOCAB, Case, all_families
from tests.cpu.rig import load, run

KINDS = {  # what they prove -> family
    "dense": "llama",
    "windows": "gemma2",
    "latents": "deepseek_v3",
    "experts": "mixtral",
    "hybrid": "qwen3_next",
}
LENGTHS = (20, 37, 50, 70, 100)
KNOBS: dict[str, Any] = {"chunk_tokens": 23, "max_rows": 3, "host_memory": 64 << 20, "num_pages": 60}


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = next(family for family in all_families() if family.name == KINDS[request.param])
    made = Case(family, tmp_path_factory.mktemp(family.name), page_tokens=16)
    rng = random.Random(3)
    made.prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    made.prompts[3] = made.prompts[4][:48] + made.prompts[3][:20]
    return made


def computed_by(engine: Engine, case: Case) -> int:
    """Run the prompts, which must give the expected tokens; return how many tokens were computed."""
    before = engine.scheduler.stats.computed_tokens
    assert run(engine, case.prompts, GREEDY) == case.expected
    return engine.scheduler.stats.computed_tokens - before


def test_a_restart_and_another_page_size_find_what_was_stored(case: Case, tmp_path: Path) -> None:
    knobs = {**KNOBS, "cache_dir": str(tmp_path / "cache")}
    first = case.engine(**knobs)
    cold = computed_by(first, case)
    first.close()
    (disk,) = first.scheduler.cache.stores
    assert disk.stats.stores > 0 and disk.stats.failures == disk.stats.drops == 0
    for page_tokens in (16, 32):
        model = case.model if page_tokens == 16 else load(case.folder, page_tokens)
        again = case.engine(model, **{**knobs, "page_tokens": page_tokens})
        warm = computed_by(again, case)
        (disk,) = again.scheduler.cache.stores
        assert disk.stats.hits > 0 and disk.stats.failures == 0, f"pages of {page_tokens}"
        assert warm < cold - sum(LENGTHS) // 3, f"pages of {page_tokens}"
        again.close()


def test_two_engines_on_one_folder_hit_what_the_other_computed(case: Case, tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    first = case.engine(**KNOBS, shared_cache=shared)
    cold = computed_by(first, case)
    first.save()
    second = case.engine(**KNOBS, shared_cache=shared)
    assert computed_by(second, case) < cold
    (store,) = second.scheduler.cache.stores
    assert store.stats.hits > 0
    first.close()
    second.close()
