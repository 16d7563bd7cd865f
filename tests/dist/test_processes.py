"""Ranks as processes: what `LLM` says with several is what it says with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.llm import LLM
from quire.types import QuireError, SamplingParams
from tests.cpu.tiny_llm import make_tiny_llm

PROMPTS = ["the sky is", "why is the sky blue because light is scattered", "blue"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
KNOBS: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_pages": 256, "max_model_len": 256, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("tiny"), max_position_embeddings=256)


def answers(folder: Path, **knobs: Any) -> list[list[int]]:
    llm = LLM(str(folder), **KNOBS, **knobs)
    try:
        return [list(done.token_ids) for params in (GREEDY, SEEDED) for done in llm.generate(PROMPTS, params)]
    finally:
        llm.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return answers(folder)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_the_tokens_of_one_rank(mesh: dict[str, int], folder: Path, expected: list[list[int]]) -> None:
    assert answers(folder, **mesh) == expected


def test_more_stages_than_layers_are_refused(folder: Path) -> None:
    with pytest.raises(QuireError, match=r"layers can't be divided among 40 pipeline stages\.") as error:
        LLM(str(folder), **KNOBS, pp=40)
    assert "\n" not in str(error.value)
