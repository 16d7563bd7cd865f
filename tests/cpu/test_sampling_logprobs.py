"""Logprobs are the raw model's, whatever sampling did to the logits: values, ranks, best alternatives, prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from quire.sampling.logprobs import prompt_logprobs, score, to_records
from quire.sampling.sampler import Sampler, start_copy, to_host
from quire.types import TokenLogprobs
from tests.cpu.sampling_cases import Case, random_case, random_logits, resolved, set_up


def check(record: TokenLogprobs, logits: np.ndarray, num_top: int) -> None:
    wanted = log_softmax(logits.astype(np.float64))
    assert record.logprob == pytest.approx(wanted[record.token_id], abs=1e-4)
    assert record.rank == 1 + (logits > logits[record.token_id]).sum()
    assert record.top_ids == np.argsort(-wanted, kind="stable")[:num_top].tolist()
    assert record.top_logprobs == pytest.approx(wanted[record.top_ids].tolist(), abs=1e-4)


@pytest.mark.parametrize("vocab_size", [70, 1001])
def test_sampled_tokens_are_scored_by_the_raw_distribution(vocab_size: int):
    rng = np.random.default_rng(vocab_size)
    cases = [random_case(rng, vocab_size) for _ in range(10)]
    asked = {i: n for i, n in enumerate([None, 0, 1, 5, None, 20, 64, None, 0, 3]) if n is not None}
    for i, num_top in asked.items():
        old = cases[i].params
        cases[i].params = resolved(
            temperature=old.temperature, top_k=old.top_k, presence_penalty=old.presence_penalty,
            repetition_penalty=1.5, logit_bias=((3, 2.0),), logprobs=num_top,
        )  # fmt: skip
    logits = random_logits(rng, 10, vocab_size)
    batch, histories = set_up(cases, vocab_size)
    host = to_host(
        start_copy(Sampler(vocab_size, "cpu").sample(torch.from_numpy(logits), batch, histories)), batch.logprobs
    )
    assert set(host.logprobs) == set(asked)
    for i, record in host.logprobs.items():
        assert record.token_id == host.tokens[i]
        check(record, logits[i], asked[i])


def test_every_row_asks():
    logits = random_logits(np.random.default_rng(0), 3, 50)
    batch, histories = set_up([Case(resolved(temperature=0.0, logprobs=2))] * 3, 50)
    host = to_host(Sampler(50, "cpu").sample(torch.from_numpy(logits), batch, histories), batch.logprobs)
    for i in range(3):
        assert host.logprobs[i].rank == 1 and host.logprobs[i].token_id == logits[i].argmax()
        check(host.logprobs[i], logits[i], 2)


def test_more_alternatives_than_tokens_and_impossible_tokens():
    logits = torch.tensor([[1.0, -float("inf"), 2.0]])
    record = to_records(score(logits, torch.tensor([1]), 10), 10)[0]
    assert record.logprob == -float("inf") and record.rank == 3
    assert record.top_ids == [2, 0, 1]


@pytest.mark.parametrize("num_positions", [0, 1, 63, 64, 65, 200])
def test_prompt_logprobs_in_slices(num_positions: int):
    rng = np.random.default_rng(num_positions)
    weight = torch.from_numpy(rng.standard_normal((8, 90)).astype(np.float32))
    hidden = torch.from_numpy(rng.standard_normal((num_positions, 8)).astype(np.float32))
    next_tokens = torch.from_numpy(rng.integers(0, 90, num_positions).astype(np.int32))
    seen = []

    def to_logits(part: torch.Tensor) -> torch.Tensor:
        seen.append(len(part))
        return part @ weight

    records = to_records(prompt_logprobs(to_logits, hidden, next_tokens, 4), 4)
    assert [r.token_id for r in records] == next_tokens.tolist()
    assert sum(seen) == num_positions and all(n <= 64 for n in seen)
    for record, logits in zip(records, (hidden @ weight).numpy(), strict=True):
        check(record, logits, 4)
