"""What the sampler draws, against the float64 reference: which tokens can be drawn, and how often each of them is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from quire.sampling.noise import stream_key
from quire.sampling.sampler import Histories, Sampler, processed_logits
from tests.cpu.sampling_cases import Case, random_case, random_logits, resolved, set_up
from tests.cpu.sampling_reference import distribution, softmax

PARAMETERS = (
    "temperature", "greedy", "top_k", "top_p", "min_p", "top_n_sigma", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "dry", "logit_bias", "bad_words", "min_tokens",
)  # fmt: skip
EDGE = 1e-5  # how close to a cut float32 may decide either way


@pytest.fixture(autouse=True)
def one_thread():
    """Thousands of small calls: on a busy machine two threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def expected(case: Case, logits: np.ndarray, allowed: np.ndarray | None = None, edge: float = 0.0) -> np.ndarray:
    """The reference's probabilities; with `edge` the cuts move a little outwards (or inwards, if negative)."""
    p = case.params
    moved = replace(
        p,
        top_p=min(1.0, p.top_p + edge) if 0 < p.top_p < 1 else p.top_p,
        min_p=min(1.0, p.min_p * (1 - edge)),
        top_n_sigma=p.top_n_sigma * (1 + edge),
    )
    return distribution(logits, moved, case.prompt_ids, case.output_ids, case.stop_ids, allowed)


def check_against_reference(cases: list[Case], logits: np.ndarray, mask: np.ndarray | None = None) -> None:
    batch, histories = set_up(cases, logits.shape[1])
    torch_mask = None if mask is None else torch.from_numpy(mask)
    processed = processed_logits(torch.from_numpy(logits), batch, histories, torch_mask).double().numpy()
    for i, case in enumerate(cases):
        allowed = None if mask is None else mask[i]
        drawn = softmax(processed[i])
        kept = drawn > 0  # not "is finite": DRY can push a token so low that its probability is 0 in any precision
        surely, perhaps = (expected(case, logits[i], allowed, edge) > 0 for edge in (-EDGE, EDGE))
        assert (surely <= kept).all() and (kept <= perhaps).all(), case
        if (surely == perhaps).all():
            wanted = expected(case, logits[i], allowed)
            assert np.allclose(drawn, wanted, rtol=2e-3, atol=1e-6), case


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter_keeps_what_the_reference_keeps(name: str):
    rng = np.random.default_rng(PARAMETERS.index(name))
    for vocab_size in (3, 40, 1001):
        cases = [random_case(rng, vocab_size, name) for _ in range(24)]
        safe = [case for case in cases if len(case.forbidden) < vocab_size]
        check_against_reference(safe, random_logits(rng, len(safe), vocab_size))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), vocab_size=st.sampled_from([7, 64, 65, 300, 2500]), masked=st.booleans())
def test_random_combinations_keep_what_the_reference_keeps(seed: int, vocab_size: int, masked: bool):
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, vocab_size) for _ in range(8)]
    cases = [case for case in cases if len(case.forbidden) < vocab_size]
    if not cases:
        return
    mask = None
    if masked:
        mask = rng.random((len(cases), vocab_size)) < 0.5
        untouched = [sorted(set(range(vocab_size)) - case.forbidden) for case in cases]
        mask[range(len(cases)), [int(rng.choice(ids)) for ids in untouched]] = True
    check_against_reference(cases, random_logits(rng, len(cases), vocab_size), mask)


def count_draws(cases: list[Case], logits: np.ndarray, num_draws: int, counter: str, copies: int = 8) -> np.ndarray:
    """How often each token is drawn in each case, [cases, vocab], all cases mixed in every call. What differs between
    draws is the position (for cases that do not look at their history) or the seed."""
    vocab_size = logits.shape[1]
    sampler = Sampler(vocab_size, "cpu")
    num = len(cases)
    batch, histories = set_up(cases * copies, vocab_size)
    many = torch.from_numpy(np.tile(logits, (copies, 1)))
    counts = np.zeros((num, vocab_size), np.int64)
    for start in range(0, num_draws, copies):
        numbers = np.repeat(np.arange(start, start + copies), num)  # [copies * cases]
        if counter == "position":
            histories = Histories(histories.tokens, histories.rows, torch.from_numpy(numbers), histories.len_bounds)
        else:
            keys = torch.tensor([stream_key(int(n), 0) for n in numbers])
            for cohort in batch.cohorts:
                cohort.key = keys if cohort.samples is None else keys[cohort.samples]
        tokens = sampler.sample(many, batch, histories).tokens.view(copies, num).numpy()
        for i in range(num):
            counts[i] += np.bincount(tokens[:, i], minlength=vocab_size)
    return counts


def assert_fits(counts: np.ndarray, probabilities: np.ndarray, what: object) -> None:
    """Chi-square with rare tokens lumped together, and nothing drawn that can't be."""
    assert counts[probabilities == 0].sum() == 0, what
    total = counts.sum()
    common = probabilities * total >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(probabilities[common] * total, probabilities[~common].sum() * total)
    if wanted[-1] < 5 and len(wanted) > 1:
        observed, wanted = np.append(observed[:-2], observed[-2:].sum()), np.append(wanted[:-2], wanted[-2:].sum())
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4, what


MIXED = (
    resolved(temperature=1.0), resolved(temperature=0.6), resolved(temperature=2.0), resolved(temperature=0.0),
    resolved(top_k=5), resolved(top_k=64), resolved(top_k=1), resolved(top_k=20, top_p=0.8),
    resolved(top_p=0.9), resolved(top_p=0.5), resolved(top_p=0.99), resolved(top_p=0.7, temperature=1.5),
    resolved(min_p=0.1), resolved(min_p=0.02, temperature=2.0), resolved(min_p=0.2, top_k=30),
    resolved(top_n_sigma=1.0), resolved(top_n_sigma=2.0, temperature=1.7), resolved(top_n_sigma=1.5, top_k=40),
    resolved(top_p=0.95, min_p=0.05), resolved(top_p=0.95, top_n_sigma=1.8), resolved(top_k=70, top_p=0.9, min_p=0.01),
    resolved(logit_bias=((3, 2.0), (4, -np.inf))), resolved(logit_bias=((0, 1.0),), top_p=0.9),
    resolved(bad_token_ids=((7,), (8,)), temperature=0.9), resolved(temperature=0.3, top_p=0.97),
)  # fmt: skip


def test_draws_over_positions_fit_the_reference():
    """Batches of 32 different rows, 5000 draws of each, the position as the only thing that moves."""
    rng = np.random.default_rng(2024)
    vocab_size = 130
    cases = [Case(p, seed=77 + i) for i, p in enumerate(MIXED)]
    cases += [Case(random_case(rng, vocab_size, "temperature", "top_p").params, seed=500 + i) for i in range(7)]
    assert len(cases) == 32
    logits = random_logits(rng, len(cases), vocab_size)
    counts = count_draws(cases, logits, 5000, "position")
    for case, row, seen in zip(cases, logits, counts, strict=True):
        assert_fits(seen, expected(case, row), case.params)


def test_draws_over_seeds_fit_the_reference_with_history():
    """32 rows with penalties, DRY, bad words, min_tokens and all the rest switched on at random."""
    rng = np.random.default_rng(7)
    vocab_size = 90
    cases = [random_case(rng, vocab_size, "temperature", name) for name in PARAMETERS if name != "greedy"]
    while len(cases) < 32:
        case = random_case(rng, vocab_size)
        if len(case.forbidden) < vocab_size:
            cases.append(case)
    logits = random_logits(rng, len(cases), vocab_size)
    counts = count_draws(cases, logits, 4000, "seed")
    for case, row, seen in zip(cases, logits, counts, strict=True):
        assert_fits(seen, expected(case, row), case)


def test_draws_over_a_large_vocabulary():
    """top-p over 49,152 tokens: head by chi-square, tail as a whole."""
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 1, 49152)
    for params in (resolved(top_p=0.9), resolved(temperature=0.7)):
        case = Case(params)
        counts = count_draws([case], logits, 512, "position", copies=32)[0]
        assert_fits(counts, expected(case, logits[0]), params)


def test_ties_are_kept_together():
    logits = np.array([[2.0, 1.0, 1.0, 1.0, 0.0]], np.float32)
    for params in (resolved(top_p=0.55), resolved(top_k=2)):  # the second token decides, and two more equal it
        batch, histories = set_up([Case(params)], 5)
        kept = torch.isfinite(processed_logits(torch.from_numpy(logits), batch, histories))
        assert kept.tolist() == [[True, True, True, True, False]]
    flat = torch.zeros(1, 100)
    flat[0, 70:] = -1.0
    batch, histories = set_up([Case(resolved(top_k=64))], 100)
    assert torch.isfinite(processed_logits(flat, batch, histories)).sum() == 70
