"""What whole-sampler tests could miss by luck in the filters: exact cuts, and sums that neighbours can not move."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.sampling.filters import apply_filters
from quire.sampling.rowwise import drop_below, row_sums
from tests.cpu.sampling_cases import Case, resolved, set_up


@pytest.mark.parametrize("vocab_size", [1, 2, 4095, 49152, 49153])
def test_row_sums_are_the_same_alone_and_in_a_batch(vocab_size: int):
    x = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    together = row_sums(x)
    assert torch.allclose(together.double(), x.double().sum(1, keepdim=True), atol=1e-2)
    for row in range(16):
        assert torch.equal(row_sums(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(2, 300), (300, 600), (20_000, 60)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(vocab_size: int, num_rows: int):
    rng = np.random.default_rng(vocab_size)
    top_p = rng.choice([0.05, 0.3, 0.9, 0.999, 0.999999, 0.5], num_rows) * rng.uniform(0.5, 1, num_rows)
    temperature = rng.choice([0.1, 0.7, 1.0, 5.0, 100.0], num_rows)
    cases = [Case(resolved(top_p=float(p), temperature=float(t))) for p, t in zip(top_p, temperature, strict=True)]
    logits = (rng.standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)
    batch, _ = set_up(cases, vocab_size)
    scores, token_ids = apply_filters(torch.from_numpy(logits), batch.cohorts[0])
    assert token_ids is None and len(batch.cohorts) == 1
    kept = torch.isfinite(scores).numpy()
    scaled = logits.astype(np.float64) / temperature[:, None]
    weights = np.exp(scaled - scaled.max(1, keepdims=True))
    probabilities = weights / weights.sum(1, keepdims=True)
    share = (probabilities * kept).sum(1)
    last = np.where(kept, probabilities, np.inf).min(1, keepdims=True)
    tied = kept & (probabilities < last * (1 + 2e-5))
    assert (share >= top_p - 1e-6).all()  # it reaches top_p ...
    assert (share - (probabilities * tied).sum(1) < top_p + 1e-6).all()  # ... and no longer does without its last
    assert (np.where(kept, 0, probabilities).max(1) <= last[:, 0]).all()


def test_top_p_at_its_ends():
    logits = torch.tensor([[3.0, 1.0, 2.0, -float("inf")]]).repeat(3, 1)
    cases = [Case(resolved(top_p=p)) for p in (1e-9, 1 - 1e-16, 1 - 1e-9)]
    batch, _ = set_up(cases, 4)
    kept = torch.zeros(3, 4, dtype=torch.bool)
    for cohort in batch.cohorts:
        scores, _ = apply_filters(logits if cohort.samples is None else logits[cohort.samples], cohort)
        kept[slice(None) if cohort.samples is None else cohort.samples] = torch.isfinite(scores)
    assert kept.tolist() == [[True, False, False, False], [True, True, True, False], [True, True, True, False]]


def test_drop_below_keeps_the_floor_itself_and_survives_infinities():
    inf = float("inf")
    x = torch.tensor([[0.0, -1.0, -2.0, -inf], [0.0, -1.0, -2.0, -inf]])
    floor = torch.tensor([[-1.0], [-inf]])
    assert drop_below(x, floor).tolist() == [[0.0, -1.0, -inf, -inf], [0.0, -1.0, -2.0, -inf]]
