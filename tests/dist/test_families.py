"""Families on several ranks have the tokens of one rank, whatever the schedule: tensor parallel, stages, and both."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cpu.families.checks import CHECKS
from tests.cpu.families.harness import Case, all_families
from tests.dist.rig import GroupCase, family_named

# Dense with and without a tied head, windows, wide and per-head norms of queries, mixtures, latents, hybrids.
FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "olmo2",
    "gpt_neox",
    "cohere",
    "mixtral",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3",
    "qwen3_next",
    "nemotron_h",
    "bamba",
)
EVERY = ("chunks", "depth 2, swap")
IN_FULL = ("chunks", "warm prefix", "swap", "recompute", "host memory", "depth 2", "depth 2, swap", "speculation")
WITH_EXPERTS = ("mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3")  # biased experts, a shared expert
BOTH = ("llama", "deepseek_v3", "qwen3_next")


MakeCase = Callable[[str, tuple[int, int, int]], GroupCase]  # of a family and its tp, pp and ep


def all_checks() -> list[tuple[str, tuple[int, int, int], str]]:
    found = []
    for name in FAMILIES:
        for tp, pp in ((2, 1), (1, 2), *([(2, 2)] if name in BOTH else [])):
            in_full = name in ("llama", "qwen3_next") and (tp, pp) != (2, 2)
            found += [(name, (tp, pp, 1), check) for check in (IN_FULL if in_full else EVERY)]
        found += [(name, (2, 1, 2), check) for check in (EVERY if name in WITH_EXPERTS else ())]
    return found


def name_one(value: object) -> str:
    return "tp{}-pp{}-ep{}".format(*value) if isinstance(value, tuple) else str(value)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeCase]:
    """One checkpoint per family, and one group of ranks per mesh of it, for all checks."""
    ones: dict[str, Case] = {}
    latest: dict[tuple[str, tuple[int, int, int]], GroupCase] = {}

    def close() -> None:
        for case in latest.values():
            case.ranks.close()
        latest.clear()

    def make(name: str, mesh: tuple[int, int, int]) -> GroupCase:
        if name not in ones:
            ones.clear()
            ones[name] = Case(family_named(name, all_families()), tmp_path_factory.mktemp(name))
        if (name, mesh) not in latest:
            close()
            latest[name, mesh] = GroupCase(ones[name], *mesh)
        return latest[name, mesh]

    yield make
    close()


@pytest.mark.parametrize(("name", "mesh", "check"), all_checks(), ids=name_one)
def test_ranks(name: str, mesh: tuple[int, int, int], check: str, case_of: MakeCase) -> None:
    CHECKS[check](case_of(name, mesh))
