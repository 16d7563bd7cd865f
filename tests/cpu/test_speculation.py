"""Speculation through the whole engine: the tokens and logprobs of no speculation, whatever the parameters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from quire import LLM
from quire.engine.costs.step_costs import StepCosts
from quire.engine.grammar.matcher import GrammarCompiler, MaskFiller
from quire.engine.speculation.build import make_drafter
from quire.engine.speculation.forced import ForcedProposer
from quire.engine.speculation.goodput import GoodputDrafter
from quire.engine.speculation.ngram import NgramProposer
from quire.engine.speculation.seam import Draft
from quire.types import Delta, FinishReason, GrammarSpec, QuireError, Request, SamplingParams, TokenLogprobs
from tests.cpu.families.checks import known_answers
from tests.cpu.rig import load, make_engine, make_request, run_deltas
from tests.cpu.test_engine_sampling import CASES
from tests.cpu.test_grammar_engine import END_OF_THINKING, EOS, TOKENS, VOCAB
from tests.cpu.tiny_models import make_tiny
from tests.pure.drafting import Oracle, RandomDrafter

SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked, depth 2": {"depth": 2, "late": True, "chunk_tokens": 7},
    "swapped": {"num_pages": 150, "preemption": "swap", "chunk_tokens": 7},
    "recomputed, depth 2": {"num_pages": 150, "preemption": "recompute", "depth": 2, "late": True},
}
MORE = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, DRY": SamplingParams(temperature=0.0, dry_multiplier=8.0, dry_allowed_len=1),
    "greedy, frequency": SamplingParams(temperature=0.0, frequency_penalty=2.0),
}
ALL = CASES | MORE
PROMPTS = [[(13 * i + 5 * (j % 4)) % 250 + 3 for j in range(3 + i % 17)] for i in range(len(ALL))]
PARAMS = [replace(params, max_tokens=24, seed=7 + i, logprobs=i % 4) for i, params in enumerate(ALL.values())]


@pytest.fixture(autouse=True)
def drafts_are_nearly_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts are verified shall not depend on how busy the machine is."""
    monkeypatch.setattr(StepCosts, "seconds", lambda self, num_tokens, num_keys: 1 + 0.01 * num_tokens)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_tiny("llama", tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB, eos_token_id=EOS)[1])


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENS, (EOS,), special_ids=(END_OF_THINKING, EOS), vocab_size=VOCAB)
    yield made
    made.close()


Answer = tuple[list[int], list[TokenLogprobs], FinishReason | None]


def answers(deltas: Sequence[list[Delta]]) -> list[Answer]:
    return [
        (
            [token for delta in one for token in delta.token_ids],
            [record for delta in one for record in delta.logprobs or []],
            one[-1].finish_reason,
        )
        for one in deltas
    ]


def approximately(records: list[TokenLogprobs]) -> Any:
    """Where sums depend on the number of rows, as in torch's products."""
    return [replace(r, logprob=pytest.approx(r.logprob, abs=1e-4), top_logprobs=pytest.approx(r.top_logprobs, abs=1e-4))
            for r in records]  # fmt: skip


def check_same(model: Any, got: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """The same tokens and reasons; the same logprobs bit for bit on the native kernels."""
    for name, one, other in zip(ALL, got, expected, strict=True):
        assert one[0] == other[0] and one[2] == other[2], name
        assert one[1] == (other[1] if model.ops.native is not None else approximately(other[1])), name


def oracle_drafter(oracle: Oracle, seed: int = 1) -> RandomDrafter:
    return RandomDrafter(random.Random(seed), right=0.8, silent=0.2, oracle=oracle, vocab=VOCAB, waits=0.8)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_parameter_samples_the_same_tokens_and_logprobs(tiny: Any, schedule: str) -> None:
    """Penalties, DRY, bad words, stop ids and min_tokens count the drafts before each position."""
    expected = answers(run_deltas(make_engine(tiny), PROMPTS, PARAMS, check=False))
    drafter = oracle_drafter(known_answers(PROMPTS, [tokens for tokens, _, _ in expected]))
    engine = make_engine(tiny, drafter=drafter, max_rows=32, **{"max_batch_tokens": 96, **SCHEDULES[schedule]})
    got = answers(run_deltas(engine, PROMPTS, PARAMS))
    check_same(tiny, got, expected)
    assert drafter.num_partial > 5 and drafter.num_accepted > 100


def test_without_its_history_a_penalty_would_differ(tiny: Any) -> None:
    """The parameters above do change what is sampled: with none of them other tokens come."""
    plain = [SamplingParams(temperature=p.temperature, max_tokens=24, seed=7 + i) for i, p in enumerate(PARAMS)]
    expected = answers(run_deltas(make_engine(tiny), PROMPTS, PARAMS, check=False))
    bare = answers(run_deltas(make_engine(tiny), PROMPTS, plain, check=False))
    changed = {name for name, one, other in zip(ALL, expected, bare, strict=True) if one[0] != other[0]}
    assert changed >= {"frequency", "greedy, DRY", "greedy, frequency"}


GRAMMARS = {
    "json": GrammarSpec.json({"type": "object", "properties": {"name": {"type": "string"}, "city": {"enum": ["12"]}},
                              "required": ["name", "city"], "additionalProperties": False}),
    "regex": GrammarSpec.regex("(true|null|12)( (true|null|12))*"),
    "skeleton": GrammarSpec.regex("(true|null): the name of the city is 12(true|null) and ends in 12 days"),
    "thinking": GrammarSpec("choice", '["true", "null"]', after_reasoning=(END_OF_THINKING,), budget=5),
    "long thinking": GrammarSpec("free", after_reasoning=(END_OF_THINKING,), budget=9),
}  # fmt: skip


def grammar_requests(compiler: GrammarCompiler) -> list[Request]:
    made = []
    for index in range(12):
        params = SamplingParams(temperature=index % 3 / 2, seed=index, max_tokens=30)
        request = make_request(f"g{index}", [5 + index, 90, 33, 12 + index], params, stop_ids=frozenset({EOS}))
        spec = list(GRAMMARS.values())[index % len(GRAMMARS)]
        request.grammar, request.arrival = compiler.compile(spec), float(index)
        made.append(request)
    return made


def run_grammars(tiny: Any, compiler: GrammarCompiler, **how: Any) -> list[list[int]]:
    engine = make_engine(tiny, **how)
    engine._fill_masks = MaskFiller()
    requests = grammar_requests(compiler)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.turn():
            assert delta.error is None, delta.error
        engine.scheduler.check()
    return [request.tokens[request.prompt_len :] for request in requests]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_grammars_and_thinking_budgets_allow_the_same_tokens(
    tiny: Any, compiler: GrammarCompiler, schedule: str
) -> None:
    expected = run_grammars(tiny, compiler)
    prompts = [request.tokens for request in grammar_requests(compiler)]
    drafter = oracle_drafter(known_answers(prompts, expected))
    assert run_grammars(tiny, compiler, drafter=drafter, **SCHEDULES[schedule]) == expected
    assert drafter.num_partial > 3 and drafter.num_accepted > 30


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_grammar_forces_is_accepted(tiny: Any, compiler: GrammarCompiler, depth: int) -> None:
    expected = run_grammars(tiny, compiler)
    stack = GoodputDrafter([ForcedProposer()])
    assert run_grammars(tiny, compiler, drafter=stack, depth=depth, late=depth == 2) == expected
    counts = stack.stats().by_name("grammar")
    assert counts.verified == counts.accepted and sum(counts.accepted) > 20


def test_samples_of_one_prompt_stay_what_they_are(tiny: Any) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20)

    def samples(**how: Any) -> list[list[int]]:
        engine = make_engine(tiny, depth=2, late=True, **how)
        requests = [make_request(f"s{i}", [5, 6, 7, 8, 9], params, sample_index=i) for i in range(4)]
        for request in requests:
            engine.add(request)
        engine.run_until_idle()
        return [request.tokens[5:] for request in requests]

    expected = samples()
    assert len({tuple(tokens) for tokens in expected}) == 4

    def oracle(request: Request, tokens: list[int]) -> int:
        seen = request.num_sampled + len(tokens)
        answer = expected[request.sample_index]
        return answer[seen] if seen < len(answer) else 0

    drafter = oracle_drafter(oracle)
    assert samples(drafter=drafter) == expected and drafter.num_accepted > 20


def test_ngrams_draft_what_repeats_and_nothing_else(tiny: Any) -> None:
    proposer = NgramProposer()
    request = make_request("r", [1, 2, 3, 4, 5, 1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20))
    assert proposer.propose([request], 3)[0].tokens == [4, 5, 1]
    request.tokens.append(9)
    assert proposer.propose([request], 3)[0].tokens == []
    request.tokens += [2, 3]
    assert proposer.propose([request], 2)[0].tokens == [9, 2], "the last place where it occurred"
    survival = proposer.propose([request], 4)[0].survival
    assert survival == sorted(survival, reverse=True) and 0 < survival[-1] < 1
    proposer.end(request)
    assert not proposer._seen


class Raising(NgramProposer):
    name = "raising"

    def propose(self, requests: Sequence[Request], budget: int) -> list[Draft]:
        if any(len(request.tokens) % 7 == 6 for request in requests):
            raise RuntimeError("a bug")
        return super().propose(requests, budget)


def test_a_proposer_that_raises_is_switched_off_for_that_request(tiny: Any) -> None:
    expected = answers(run_deltas(make_engine(tiny), PROMPTS, PARAMS, check=False))
    stack = GoodputDrafter([Raising(), NgramProposer()])
    check_same(tiny, answers(run_deltas(make_engine(tiny, drafter=stack), PROMPTS, PARAMS)), expected)
    assert stack.stats().by_name("raising").failed == len(PROMPTS)
    assert not stack._requests


def test_unknown_proposers_are_refused() -> None:
    assert make_drafter("off") is None and make_drafter("ngram, grammar") is not None
    for bad in ("ngrams", "ngram,", "off,ngram", ""):
        with pytest.raises(QuireError) as caught:
            make_drafter(bad)
        assert "\n" not in str(caught.value) and "ngram" in str(caught.value)


def test_the_built_in_model_gives_the_same_bits() -> None:
    """Greedy and sampled, alone and together, with a request that wants no drafts."""
    prompts = [[{"role": "user", "content": text}] for text in ("count to 30", "Write a poem about a dog")]
    params = [SamplingParams(temperature=t, seed=5, max_tokens=60, logprobs=2) for t in (0.0, 0.7)]
    seen: list[Any] = []
    for speculate in ("off", "ngram"):
        with LLM("smollm2", speculate=speculate, max_model_len=512) as llm:
            outputs = [output for each in params for output in llm.chat(prompts, each)]
            outputs += llm.chat(prompts[:1], replace(params[0], speculate=False))
            seen.append([(output.token_ids, output.logprobs) for output in outputs])
            accepted = [output.usage.accepted_prediction_tokens for output in outputs]
    assert seen[0] == seen[1]
    assert sum(accepted) > 10 and accepted[-1] == 0
