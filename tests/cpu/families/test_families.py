"""Every family against transformers: logits, chunks, warm prefixes, preemption by swap and by recompute, overlap."""

from __future__ import annotations

import pytest

from tests.cpu.families.harness import CHECKS, Case, all_families


@pytest.fixture(scope="module", params=all_families(), ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param.name.replace(" ", "-")))


@pytest.mark.parametrize("check", CHECKS)
def test_family(case: Case, check: str) -> None:
    if check in case.family.without:
        pytest.skip(f"{case.family} does without")
    CHECKS[check](case)
