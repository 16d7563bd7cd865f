"""Tensor parallel: families on two ranks have the tokens of one rank, whatever the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cpu.families.checks import CHECKS
from tests.cpu.families.harness import Case, all_families
from tests.dist.rig import GroupCase, family_named

# Dense with and without a tied head, windows, wide and per-head norms of queries, mixtures, latents, hybrids.
FAMILIES = ("llama", "qwen3", "gemma2", "olmo2", "gpt_neox", "cohere", "mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3",
            "qwen3_next", "nemotron_h", "bamba")  # fmt: skip
EVERY = ("chunks", "depth 2, swap")
IN_FULL = ("chunks", "warm prefix", "swap", "recompute", "host memory", "depth 2", "depth 2, swap", "speculation")


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], GroupCase]]:
    latest: dict[tuple[str, int], GroupCase] = {}

    def make(name: str, tp: int) -> GroupCase:
        if (name, tp) not in latest:
            for case in latest.values():
                case.ranks.close()
            latest.clear()
            one = Case(family_named(name, all_families()), tmp_path_factory.mktemp(name))
            latest[name, tp] = GroupCase(one, tp)
        return latest[name, tp]

    yield make
    for case in latest.values():
        case.ranks.close()


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name in FAMILIES for check in (IN_FULL if name in ("llama", "qwen3_next") else EVERY)],
)
def test_two_ranks(name: str, check: str, case_of: Callable[[str, int], GroupCase]) -> None:
    CHECKS[check](case_of(name, 2))
