"""Ranks as processes: what `LLM` says with several is what it says with one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.llm import LLM
from quire.ranks.group import RankGroup
from quire.ranks.launch import LocalRanks
from quire.types import QuireError, SamplingParams
from tests.cpu.tiny_llm import make_tiny_llm

PROMPTS = ["the sky is", "why is the sky blue because light is scattered", "blue"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
KNOBS: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_pages": 256, "max_model_len": 256, "device": "cpu",
                         "spare_rank": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("tiny"), max_position_embeddings=256)


def answers(folder: Path, **knobs: Any) -> list[list[int]]:
    llm = LLM(str(folder), **KNOBS, **knobs)
    try:
        return tokens_of(llm)
    finally:
        llm.close()


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(done.token_ids) for params in (GREEDY, SEEDED) for done in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return answers(folder)


@pytest.mark.parametrize(("mesh", "fault"), [({"tp": 2}, signal.SIGKILL), ({"pp": 2}, signal.SIGSTOP)], ids=str)
def test_a_lost_rank_costs_no_token(
    mesh: dict[str, int], fault: signal.Signals, folder: Path, expected: list[list[int]]
) -> None:
    """Every rank in turn is killed or stopped while requests run, and again while none does. The others go on."""
    llm = LLM(str(folder), **KNOBS, **mesh)
    ranks = ranks_of(llm)
    try:
        for number in range(2):
            before = ranks.pids
            Fault(llm, lambda pid=before[number]: os.kill(pid, fault))
            assert tokens_of(llm) == expected
            assert [pid == old for pid, old in zip(ranks.pids, before, strict=True)] == [number == 1, number == 0]
        os.kill(ranks.pids[0], signal.SIGKILL)
        assert tokens_of(llm) == expected
        llm._engine.scheduler.check()
    finally:
        llm.close()


class Fault:
    """Does something to a rank when the engine sends its tenth step."""

    def __init__(self, llm: LLM, act: Callable[[], None]):
        self._inner, self._act, self._num_steps = llm._engine.workers, act, 0
        self._engine = llm._engine
        llm._engine.workers = self

    def forward(self, plan: Any) -> Any:
        self._num_steps += 1
        if self._num_steps == 10:
            self._act()
            self._engine.workers = self._inner
        return self._inner.forward(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def ranks_of(llm: LLM) -> LocalRanks:
    group = llm._engine.workers
    assert isinstance(group, RankGroup)
    ranks = group._on_close.__self__  # type: ignore[attr-defined]
    assert isinstance(ranks, LocalRanks)
    return ranks


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_the_tokens_of_one_rank(mesh: dict[str, int], folder: Path, expected: list[list[int]]) -> None:
    assert answers(folder, **mesh) == expected


def test_more_stages_than_layers_are_refused(folder: Path) -> None:
    with pytest.raises(QuireError, match=r"layers can't be divided among 40 pipeline stages\.") as error:
        LLM(str(folder), **KNOBS, pp=40)
    assert "\n" not in str(error.value)


def test_whole_experts_on_two_ranks(tmp_path: Path) -> None:
    folder = make_tiny_llm(tmp_path, "qwen3_moe", max_position_embeddings=256)
    assert answers(folder, ep=2) == answers(folder)


def test_whole_experts_need_experts(folder: Path) -> None:
    with pytest.raises(QuireError, match=r"A llama model has no experts\."):
        LLM(str(folder), **KNOBS, ep=2)
