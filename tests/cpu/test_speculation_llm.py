"""Speculation through `LLM`: the same tokens as without, for every setting, greedy and sampled, with predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire import LLM, GrammarSpec, QuireError, SamplingParams
from quire.config_build import build_config
from quire.engine.costs.step_costs import StepCosts
from tests.cpu.tiny_llm import make_tiny_llm

TEXT = "the sky is blue because light is scattered " * 3
PROMPTS = [TEXT, "why is the sky blue", f"repeat: {TEXT}"]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=48, ignore_eos=True, repetition_penalty=1.1, logprobs=2)


@pytest.fixture(autouse=True)
def drafts_are_nearly_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts are verified shall not depend on how busy the machine is."""
    monkeypatch.setattr(StepCosts, "seconds", lambda self, num_tokens, num_keys: 1 + 0.01 * num_tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("speculation") / "model")


def outputs(folder: Path, params: SamplingParams, **settings: object) -> tuple[list[list[int]], int]:
    """Return the tokens of all prompts, and how many drafts were accepted."""
    with LLM(str(folder), dtype="float32", **settings) as llm:
        done = llm.generate(PROMPTS, params)
    return [one.token_ids for one in done], sum(one.usage.accepted_prediction_tokens for one in done)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculate", ["ngram", "suffix", "auto"])
def test_tokens_are_those_without_speculation(folder: Path, speculate: str, params: SamplingParams) -> None:
    plain, none = outputs(folder, params, speculate="off")
    drafted, accepted = outputs(folder, params, speculate=speculate)
    assert drafted == plain and none == 0
    if params is GREEDY:
        assert accepted > 0, "a tiny model repeats itself, which drafts find"


def test_a_prediction_is_used_and_changes_no_token(folder: Path) -> None:
    with LLM(str(folder), dtype="float32", speculate="auto") as llm:
        (plain,) = llm.generate(PROMPTS[:1], SamplingParams(temperature=0.9, seed=3, max_tokens=60, speculate=False))
        assert plain.usage.accepted_prediction_tokens == plain.usage.rejected_prediction_tokens == 0
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=60, prediction=plain.text)
        (predicted,) = llm.generate(PROMPTS[:1], params)
        assert predicted.token_ids == plain.token_ids
        assert predicted.usage.accepted_prediction_tokens > 0


def test_a_grammar_holds_with_drafts(folder: Path) -> None:
    grammar = GrammarSpec.regex(r"the sky is (blue|red), the sky is (blue|red) and light is scattered")
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=64, grammar=grammar)
    plain, _ = outputs(folder, params, speculate="off")
    drafted, accepted = outputs(folder, params, speculate="auto")
    assert drafted == plain and accepted > 0


def test_a_prediction_longer_than_the_context_is_refused(folder: Path) -> None:
    with LLM(str(folder), dtype="float32", max_model_len=64) as llm:
        with pytest.raises(QuireError, match="prediction has") as caught:
            llm.generate("why", SamplingParams(prediction="sky is " * 200))
        assert caught.value.param == "prediction"


def test_an_unknown_proposer_is_named(folder: Path) -> None:
    with pytest.raises(QuireError, match="no proposer 'crystal'"):
        LLM(str(folder), speculate="ngram,crystal")


def test_a_stop_string_within_a_draft_cuts_the_text_there(folder: Path) -> None:
    """The step has accepted tokens behind the stop string; text, usage and the next request know nothing of them."""
    plain = SamplingParams(temperature=0.9, seed=3, max_tokens=60, speculate=False)
    with LLM(str(folder), dtype="float32", speculate="auto") as llm:
        (whole,) = llm.generate(PROMPTS[:1], plain)
        accepted = 0
        for place in (10, 17, 25, 40):
            stop = llm.tokenizer.decode(whole.token_ids[place : place + 2]).strip()
            if not stop:
                continue
            (expected,) = llm.generate(PROMPTS[:1], replace(plain, stop=(stop,)))
            params = replace(plain, stop=(stop,), speculate=True, prediction_ids=tuple(whole.token_ids))
            (drafted,) = llm.generate(PROMPTS[:1], params)
            assert drafted.text == expected.text and drafted.finish_reason == expected.finish_reason == "stop"
            assert drafted.token_ids == expected.token_ids
            assert drafted.usage.completion_tokens == expected.usage.completion_tokens
            accepted += drafted.usage.accepted_prediction_tokens
        assert accepted > 0
        (again,) = llm.generate(PROMPTS[:1], plain)
        assert again.token_ids == whole.token_ids


def test_outputs_are_kept_beside_the_cache(folder: Path, tmp_path: Path) -> None:
    """The next engine drafts from what the last one has answered, for the same salt, and gives the same tokens."""
    kept = {"cache_dir": str(tmp_path / "cache"), "page_tokens": 16, "speculate": "suffix", "dtype": "float32"}
    params = SamplingParams(temperature=1.5, seed=9, max_tokens=40, ignore_eos=True)
    found = []
    for salt in (b"mine", b"another's", b"mine"):
        with LLM(str(folder), **kept) as llm:
            (output,) = llm.generate(PROMPTS[1:2], params, salt=salt)
            found.append((output.token_ids, output.usage.accepted_prediction_tokens))
    assert len({tuple(tokens) for tokens, _ in found}) == 1
    assert found[2][1] > max(found[0][1], found[1][1]) + 10


def test_settings_come_from_toml_environment_and_arguments(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text('[engine]\nspeculate = "suffix"\n')
    assert build_config(file=file, env={}, flags={}).engine.speculate == "suffix"
    monkeypatch.setenv("QUIRE_SPECULATE", "ngram")
    config = build_config(file=file, env={"QUIRE_SPECULATE": "ngram"}, flags={})
    assert config.engine.speculate == "ngram", "the environment goes before the file"
    with LLM(str(folder), dtype="float32", speculate="off") as llm:
        assert llm.engine.scheduler.speculation is None, "and the argument before both"
