"""Every family against transformers: logits, chunks, warm prefixes, preemption by swap and by recompute, overlap.

One of each kind runs all checks by default; of the others the checks that see most, the rest is slow (`make slow`).
"""

from __future__ import annotations

from typing import Any

import pytest

from quire.models.registry import FAMILIES
from tests.cpu.families.cpu_paths import BY_DEFAULT, CPU_CHECKS
from tests.cpu.families.harness import CHECKS, Case, all_families, model_type

SEE_MOST = ("logits", "chunks", "depth 2, swap", "memory")
IN_FULL = ("llama", "qwen3", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "gpt2")


def pairs() -> list[Any]:
    found, proved = [], set()
    for family in all_families():
        kind = model_type(family)
        for check in CHECKS:
            if check not in family.without:
                in_full = kind in IN_FULL and kind not in proved
                marks = [] if in_full or check in SEE_MOST else [pytest.mark.slow]
                found.append(pytest.param(family, check, id=f"{family}-{check}", marks=marks))
        for check in CPU_CHECKS if kind in FAMILIES else ():
            marks = [] if family.name in BY_DEFAULT[check] else [pytest.mark.slow]
            found.append(pytest.param(family, check, id=f"{family}-{check}", marks=marks))
        proved.add(kind)
    return found


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param.name.replace(" ", "-")))


@pytest.mark.parametrize(("case", "check"), pairs(), indirect=["case"], scope="module")
def test_family(case: Case, check: str) -> None:
    (CHECKS | CPU_CHECKS)[check](case)
