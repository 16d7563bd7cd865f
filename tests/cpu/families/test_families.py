"""Every family against transformers: logits, chunks, warm prefixes, preemption by swap and by recompute, overlap.

Variants of a model type that is proved in full run the checks that see most; the rest of theirs is slow.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cpu.families.harness import CHECKS, Case, all_families, model_type

SEE_MOST = ("logits", "chunks", "depth 2, swap", "memory")


def pairs() -> list[Any]:
    found, proved = [], set()
    for family in all_families():
        kind = model_type(family)
        for check in CHECKS:
            if check not in family.without:
                marks = [pytest.mark.slow] if kind in proved and check not in SEE_MOST else []
                found.append(pytest.param(family, check, id=f"{family}-{check}", marks=marks))
        proved.add(kind)
    return found


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param.name.replace(" ", "-")))


@pytest.mark.parametrize(("case", "check"), pairs(), indirect=["case"], scope="module")
def test_family(case: Case, check: str) -> None:
    CHECKS[check](case)
