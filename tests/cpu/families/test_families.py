"""Every family against transformers: logits, chunks, warm prefixes, preemption by swap and by recompute, overlap.

One of each kind runs all checks by default; of the others the checks that see most, the rest is slow (`make slow`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.models.registry import FAMILIES
from tests.cpu.families.checks import CHECKS
from tests.cpu.families.cpu_paths import BY_DEFAULT, CPU_CHECKS
from tests.cpu.families.harness import Case, Family, all_families, model_type

SEE_MOST = ("logits", "chunks", "depth 2, swap", "memory")
IN_FULL = ("llama", "qwen3", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "gpt2")


def pairs() -> list[Any]:
    found, proved = [], set()
    for family in all_families():
        kind = model_type(family)
        for check in CHECKS:
            if check not in family.without:
                in_full = kind in IN_FULL and kind not in proved
                runs = not family.slow and (in_full or check in SEE_MOST)
                marks = [] if runs else [pytest.mark.slow]
                found.append(pytest.param(family, check, id=f"{family}-{check}", marks=marks))
        for check in CPU_CHECKS if kind in FAMILIES else ():
            marks = [] if family.name in BY_DEFAULT[check] else [pytest.mark.slow]
            found.append(pytest.param(family, check, id=f"{family}-{check}", marks=marks))
        proved.add(kind)
    return found


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Case]:
    """One case for all checks of a family, which come one after the other: what they share is made once."""
    latest: dict[str, Case] = {}

    def make(family: Family) -> Case:
        if family.name not in latest:
            latest.clear()
            latest[family.name] = Case(family, tmp_path_factory.mktemp(family.name.replace(" ", "-")))
        return latest[family.name]

    return make


@pytest.mark.parametrize(("family", "check"), pairs())
def test_family(family: Family, check: str, case_of: Callable[[Family], Case]) -> None:
    (CHECKS | CPU_CHECKS)[check](case_of(family))
