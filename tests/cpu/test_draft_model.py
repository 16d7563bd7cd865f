"""A draft model beside the model: the same tokens, drafts that are right where the two agree, and clear refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM, QuireError, SamplingParams
from quire.config import Config
from quire.config_build import override_config
from quire.engine.costs.step_costs import StepCosts
from quire.engine.speculation.build import make_drafter, parse_speculate
from quire.models.drafting import DraftModel
from quire.startup.cache_plan import memory_report
from quire.startup.draft_network import LoadedDraft
from tests.cpu.rig import load, make_engine, run_deltas
from tests.cpu.tiny_llm import make_tiny_llm
from tests.cpu.tiny_models import make_tiny
from tests.pure.shadow import STATE

SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked, depth 2": {"depth": 2, "late": True, "chunk_tokens": 7},
    "swapped": {"num_pages": 40, "preemption": "swap", "chunk_tokens": 7},
    "recomputed, depth 2": {"num_pages": 40, "preemption": "recompute", "depth": 2, "late": True},
}
PROMPTS = [[(13 * i + 5 * (j % 4)) % 250 + 3 for j in range(3 + 7 * i % 41)] for i in range(10)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=6, top_p=0.9, repetition_penalty=1.3, logprobs=1, max_tokens=24),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=8, top_k=40, min_p=0.05, max_tokens=24, speculate=False),
]
EACH = [replace(PARAMS[i % len(PARAMS)], seed=20 + i) for i in range(len(PROMPTS))]


@pytest.fixture(autouse=True)
def drafts_are_nearly_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts are proposed shall not depend on how busy the machine is."""
    monkeypatch.setattr(StepCosts, "seconds", lambda self, num_tokens, num_keys: 1 + 0.01 * num_tokens)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model, and a smaller one that does not agree with it."""
    folder = tmp_path_factory.mktemp("models")
    small = make_tiny("llama", folder / "small", vocab_size=256, hidden_size=32, num_hidden_layers=1)[1]
    return load(make_tiny("qwen3", folder / "large", vocab_size=256)[1]), load(small)


def tokens_of(engine: Any) -> list[list[int]]:
    deltas = run_deltas(engine, PROMPTS, EACH)
    return [[token for delta in one for token in delta.token_ids] for one in deltas]


def counts(engine: Any) -> tuple[int, int]:
    """How many drafts were verified, and how many of these accepted."""
    found = engine.scheduler._drafts.drafter.stats().by_name("draft")
    return sum(found.verified), sum(found.accepted)


@pytest.mark.parametrize("agrees", [True, False], ids=["itself", "another"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_are_those_without_a_draft_model(models: tuple[Any, Any], schedule: str, agrees: bool) -> None:
    """As its own draft model a model is always right, greedy and sampled, whatever happens to a request: the draft
    model's cache is never behind, and its noise is the model's."""
    model, other = models
    expected = tokens_of(make_engine(model))
    draft = LoadedDraft("draft", DraftModel(model if agrees else other, "draft"), 0)
    how = {"max_rows": 6, **SCHEDULES[schedule]}
    engine = make_engine(model, draft=draft, drafter=make_drafter("draft:x", "draft"), **how)
    for _ in range(2):  # the second time over pages that the first has left
        assert tokens_of(engine) == expected
    verified, accepted = counts(engine)
    if "num_pages" not in how:
        assert engine.scheduler.cache.stats.hit_tokens > 0
    else:
        assert engine.scheduler.stats.preemptions > 0
    if agrees:
        assert accepted > 100 and accepted >= 0.98 * verified
    else:
        assert accepted < 0.5 * verified, "rejected drafts were caught up with"


def test_drafts_beside_prompts_are_right(models: tuple[Any, Any]) -> None:
    """A row decodes with drafts while another's prompt comes in chunks."""
    model, _ = models
    draft = LoadedDraft("draft", DraftModel(model, "draft"), 0)
    engine = make_engine(
        model, draft=draft, drafter=make_drafter("draft:x", "draft"), chunk_tokens=5, max_batch_tokens=24
    )
    assert tokens_of(engine) == tokens_of(make_engine(model))
    assert counts(engine)[1] > 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("draft") / "model")


def test_it_is_loaded_beside_the_model_and_its_cache_is_in_the_memory_plan(folder: Path, tmp_path: Path) -> None:
    small = make_tiny_llm(tmp_path / "small", num_hidden_layers=1)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with LLM(str(folder), dtype="float32") as llm:
        (plain,) = llm.generate("why is the sky blue", params)
    with LLM(str(folder), dtype="float32", speculate=f"suffix,draft:{small}") as llm:
        (drafted,) = llm.generate("why is the sky blue", params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.usage.accepted_prediction_tokens + drafted.usage.rejected_prediction_tokens > 0
    options = {"model": str(folder), "dtype": "float32", "cache_memory": 1 << 22}
    alone = memory_report(override_config(Config(), options))
    both = memory_report(override_config(Config(), {**options, "speculate": f"draft:{small}"}))
    assert [spec.group for spec in both.specs] == ["full", "draft full"]
    assert both.weights > alone.weights and both.num_units[0] < alone.num_units[0]


def test_another_tokenizer_is_refused_with_its_first_differing_token(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_llm(tmp_path / "other", added=["<think>"])
    with pytest.raises(QuireError, match=r"another tokenizer: token \d+ is '<think>' there and missing in") as caught:
        LLM(str(folder), dtype="float32", speculate=f"draft:{other}")
    assert "\n" not in str(caught.value) and caught.value.param == "speculate"


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    large = make_tiny("llama", tmp_path / "large", vocab_size=256)[1]
    small = make_tiny("llama", tmp_path / "small", vocab_size=200)[1]
    with pytest.raises(QuireError, match="a vocabulary of 200 tokens, the model has one of 256"):
        LLM(str(large), dtype="float32", speculate=f"draft:{small}")


def test_a_draft_model_with_recurrent_state_is_refused(models: tuple[Any, Any]) -> None:
    hybrid: Any = SimpleNamespace(specs=[*models[0].specs, STATE])
    with pytest.raises(QuireError, match="hybrid keeps a recurrent state"):
        DraftModel(hybrid, "hybrid")


def test_settings_of_draft_networks() -> None:
    assert parse_speculate("suffix, draft:some/model").draft_model == "some/model"
    assert parse_speculate("mtp").head and parse_speculate("auto").head_if_any and parse_speculate("off").is_off
    for bad in ("draft:", "draft", "mtp,draft:x", "draft:x,draft:y"):
        with pytest.raises(QuireError) as caught:
            parse_speculate(bad)
        assert "\n" not in str(caught.value) and caught.value.param == "speculate"
