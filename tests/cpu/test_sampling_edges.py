"""Bad rows, forbidden tokens, masks and penalties, on examples small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.sampling.edits import apply_edits
from quire.sampling.sampler import Sampler, to_host
from tests.cpu.sampling_cases import Case, random_history, random_logits, resolved, set_up
from tests.cpu.sampling_reference import edited_logits

INF = float("inf")
NAN = float("nan")


def sample(cases: list[Case], logits: torch.Tensor, mask: torch.Tensor | None = None):
    batch, histories = set_up(cases, logits.shape[1])
    return to_host(Sampler(logits.shape[1], "cpu").sample(logits, batch, histories, mask), batch.logprobs)


PARAMS = (
    resolved(temperature=0.0), resolved(), resolved(top_k=5), resolved(top_p=0.5), resolved(top_k=5, top_p=0.5),
    resolved(top_n_sigma=1.0), resolved(min_p=0.1), resolved(top_p=0.5, repetition_penalty=1.2, dry_multiplier=1.0),
    resolved(logit_bias=((3, -INF),), logprobs=2),
)  # fmt: skip


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("poison", [[NAN], [INF], [-INF] * 300, [INF, -INF], [NAN, INF]])
def test_bad_rows_are_flagged_and_the_others_do_not_notice(params, poison):
    rng = np.random.default_rng(1)
    cases = [Case(params, seed=i) for i in range(6)]
    good = torch.from_numpy(random_logits(rng, 6, 300))
    clean = sample(cases, good)
    assert clean.bad == []
    spoiled = good.clone()
    for row in (1, 4):
        spoiled[row, : len(poison)] = torch.tensor(poison)
    result = sample(cases, spoiled)
    assert result.bad == [1, 4]
    assert all(0 <= token < 300 for token in result.tokens)
    assert [t for i, t in enumerate(result.tokens) if i not in (1, 4)] == [
        t for i, t in enumerate(clean.tokens) if i not in (1, 4)
    ]


@pytest.mark.parametrize("params", PARAMS)
def test_some_minus_inf_is_fine(params):
    logits = torch.full((1, 300), -INF)
    logits[0, [7, 9]] = torch.tensor([1.0, 0.5])
    for seed in range(20):
        result = sample([Case(params, seed=seed)], logits)
        assert result.bad == [] and result.tokens[0] in (7, 9)


def test_nothing_left_to_choose_is_bad():
    everything = tuple((token, -INF) for token in range(20))
    cases = [
        Case(resolved(logit_bias=everything)),
        Case(resolved(temperature=0.0, logit_bias=everything)),
        Case(resolved()),
    ]
    mask = torch.ones(3, 20, dtype=torch.bool)
    assert sample(cases, torch.zeros(3, 20), mask).bad == [0, 1]
    mask[2] = False
    assert sample(cases, torch.zeros(3, 20), mask).bad == [0, 1, 2]


def test_a_poisoned_logit_is_bad_even_where_a_mask_hides_it():
    logits = torch.zeros(1, 20)
    logits[0, 3] = NAN
    mask = torch.zeros(1, 20, dtype=torch.bool)
    mask[0, 5] = True
    assert sample([Case(resolved())], logits, mask).bad == [0]


def test_logits_are_left_as_they_were():
    logits = torch.randn(len(PARAMS), 300)
    before = logits.clone()
    sample([Case(params) for params in PARAMS], logits, torch.rand(len(PARAMS), 300) < 0.8)
    assert torch.equal(logits, before)


def test_greedy_takes_the_first_of_equals():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    for params in (resolved(temperature=0.0), resolved(temperature=1e-9), resolved(top_k=1), resolved(top_p=0.0)):
        assert sample([Case(params)], logits).tokens == [1]


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 100])
def test_packed_mask_means_the_same_as_a_plain_one(vocab_size: int):
    rng = np.random.default_rng(vocab_size)
    allowed = rng.random((4, vocab_size)) < 0.5
    allowed[:, -1] = True
    num_words = -(-vocab_size // 32)
    bits = np.zeros((4, num_words * 32), np.uint8)
    bits[:, :vocab_size] = allowed
    packed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    batch, histories = set_up([Case(resolved())] * 4, vocab_size)
    logits = torch.from_numpy(random_logits(rng, 4, vocab_size))
    plain = apply_edits(logits, batch, histories, torch.from_numpy(allowed))
    assert torch.equal(apply_edits(logits, batch, histories, packed), plain)
    assert torch.equal(torch.isfinite(plain), torch.from_numpy(allowed))


def edited(case: Case, logits: torch.Tensor) -> list[float]:
    batch, histories = set_up([case], logits.shape[1])
    return apply_edits(logits, batch, histories)[0].tolist()


def test_min_tokens_forbids_stop_ids_until_it_is_reached():
    for output_len, may_stop in [(0, False), (2, False), (3, True), (4, True)]:
        case = Case(resolved(min_tokens=3), [1, 1], [1] * output_len, stop_ids=(2, 4, 99))
        assert edited(case, torch.ones(1, 6)) == [1, 1, 1 if may_stop else -INF, 1, 1 if may_stop else -INF, 1]


def test_bad_words_of_one_and_several_tokens():
    words = ((0,), (3, 4, 1), (4, 2), (9, 3, 4, 5), (7, 8))
    case = Case(resolved(bad_token_ids=words), [6, 3], [4])  # (9, 3, 4) does not stand here, and is longer than the row
    assert edited(case, torch.zeros(1, 10)) == [-INF, -INF, -INF, 0, 0, 0, 0, 0, 0, 0]
    assert edited(Case(resolved(bad_token_ids=((4, 2),)), [4, 6]), torch.zeros(1, 3)) == [0, 0, 0]
    assert edited(Case(resolved(bad_token_ids=((1, 1, 2),)), [1]), torch.zeros(1, 3)) == [0, 0, 0]  # one 1 is not two


def test_unknown_ids_are_ignored():
    params = resolved(logit_bias=((10, 5.0), (-1, 5.0), (2, 1.0)), bad_token_ids=((10,), (3, 11)), min_tokens=5)
    assert edited(Case(params, stop_ids=(10, 400, -1)), torch.zeros(1, 10)) == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


def test_penalties_by_hand():
    logits = torch.tensor([[4.0, -4.0, 4.0, 4.0]])
    assert edited(Case(resolved(repetition_penalty=2.0), [0, 1], [2]), logits) == [2, -8, 2, 4]
    assert edited(Case(resolved(presence_penalty=1.0), [0, 1], [2, 2]), logits) == [4, -4, 3, 4]
    assert edited(Case(resolved(frequency_penalty=0.5), [0, 2], [2, 2, 1]), logits) == [4, -4.5, 3, 4]
    assert edited(Case(resolved(presence_penalty=1.0, frequency_penalty=1.0), [0, 1]), logits) == logits[0].tolist()


def test_dry_by_hand():
    params = {"dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_len": 2}
    flat = torch.zeros(1, 8)
    # 1 2 3 was followed by 4, and 2 3 by 5; the row ends in 1 2 3.
    history = [1, 2, 3, 4, 2, 3, 5, 1, 2, 3]
    assert edited(Case(resolved(**params), history), flat) == [0, 0, 0, 0, -2, -1, 0, 0]
    broken = resolved(**params, dry_breaker_ids=(1,))  # the match may not contain 1
    assert edited(Case(broken, history), flat) == [0, 0, 0, 0, -1, -1, 0, 0]
    no_breaker = resolved(**params, dry_breaker_ids=(5,))  # a breaker is not penalised
    assert edited(Case(no_breaker, history), flat) == [0, 0, 0, 0, -2, 0, 0, 0]
    recent = resolved(**params, dry_range=6)  # 2 3 5 1 2 3
    assert edited(Case(recent, history), flat) == [0, 0, 0, 0, 0, -1, 0, 0]
    assert edited(Case(resolved(**params), [6] * 5), flat)[6] == -(2.0**2)  # overlapping itself


@pytest.mark.parametrize("seed", range(5))
def test_dry_and_penalties_match_the_reference_on_random_histories(seed: int):
    rng = np.random.default_rng(seed)
    vocab_size = 50
    cases = []
    for i in range(20):
        prompt_ids, output_ids = random_history(rng, vocab_size, 120)
        dry = {
            "dry_multiplier": 0.7, "dry_base": float(rng.uniform(1, 1.2)), "dry_allowed_len": int(rng.integers(1, 5)),
            "dry_range": int(rng.choice([0, 3, 30])), "dry_breaker_ids": tuple(rng.integers(0, 50, i % 4).tolist()),
        }  # fmt: skip
        rest = {
            "repetition_penalty": float(rng.uniform(0.5, 2)), "presence_penalty": float(rng.normal()),
            "frequency_penalty": float(rng.normal()),
        }  # fmt: skip
        params = resolved(**(dry if i % 3 else {}), **(rest if i % 2 else {}))
        cases.append(Case(params, prompt_ids, output_ids))
    logits = random_logits(rng, len(cases), vocab_size)
    batch, histories = set_up(cases, vocab_size, rng)
    ours = apply_edits(torch.from_numpy(logits), batch, histories).numpy()
    for i, case in enumerate(cases):
        wanted = edited_logits(logits[i], case.params, case.prompt_ids, case.output_ids, ())
        assert np.allclose(ours[i], wanted, rtol=1e-4, atol=1e-4), case


def test_long_repetitions_are_as_good_as_forbidden_but_finite():
    case = Case(resolved(dry_multiplier=1.0, dry_base=4.0), [3] * 500)
    values = edited(case, torch.zeros(1, 8))
    assert values[3] < -1e6 and np.isfinite(values[3]) and values[:3] == [0, 0, 0]
