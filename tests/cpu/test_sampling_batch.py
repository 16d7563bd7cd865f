"""A row's token depends on its own logits, parameters, seed and position, and on nothing that stands beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.sampling.batch import EVERYTHING, GREEDY, UNFILTERED
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import Sampler, processed_logits, to_host
from tests.cpu.sampling_cases import Case, random_case, random_logits, resolved, set_up


def draw(cases: list[Case], logits: Tensor) -> tuple[list[int], Tensor]:
    batch, histories = set_up(cases, logits.shape[1])
    tokens = Sampler(logits.shape[1], "cpu").sample(logits, batch, histories).tokens
    return tokens.tolist(), processed_logits(logits, batch, histories)


@pytest.mark.parametrize(("vocab_size", "seed"), [(257, 1), (257, 2), (5000, 3), (5000, 4), (49152, 5)])
def test_alone_in_a_batch_and_in_another_order_bit_for_bit(vocab_size: int, seed: int):
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, vocab_size) for _ in range(24)]
    cases += [random_case(rng, vocab_size, "temperature", name) for name in ("top_p", "top_k", "min_p", "top_n_sigma")]
    cases += [random_case(rng, vocab_size, "temperature", "top_p", "top_n_sigma") for _ in range(4)]
    logits = torch.from_numpy(random_logits(rng, 32, vocab_size))
    together, kept = draw(cases, logits)
    order = rng.permutation(32).tolist()
    shuffled, kept_shuffled = draw([cases[i] for i in order], logits[order])
    assert shuffled == [together[i] for i in order]
    assert torch.equal(kept_shuffled, kept[order])
    for i, case in enumerate(cases):
        alone, kept_alone = draw([case], logits[i : i + 1])
        assert alone == [together[i]], case
        assert torch.equal(kept_alone[0], kept[i]), case


def test_seed_index_and_position_each_change_the_draw():
    logits = torch.zeros(1, 5000)
    base = Case(resolved(), prompt_ids=[1, 2, 3], seed=9)
    others = [
        Case(resolved(), prompt_ids=[1, 2, 3], seed=10),
        Case(resolved(), prompt_ids=[1, 2, 3], seed=9, sample_index=1),
        Case(resolved(), prompt_ids=[1, 2, 3, 4], seed=9),
    ]
    first = draw([base], logits)[0]
    assert draw([base], logits)[0] == first
    assert all(draw([other], logits)[0] != first for other in others)
    # Where prompt ends and output begins is nothing to the noise: a request resumed after preemption goes on alike.
    resumed = Case(resolved(), prompt_ids=[1], output_ids=[2, 3], seed=9)
    assert draw([resumed], logits)[0] == first


def test_a_row_may_stand_in_a_step_more_than_once():
    rows = SamplingRows(4, 50, "cpu")
    rows.set(Case(resolved(temperature=0.0, logit_bias=((7, 9.0),))).init(2))
    rows.set(Case(resolved(temperature=0.0)).init(1))
    batch = rows.gather([2, 1, 2])
    _, histories = set_up([Case(resolved())] * 3, 50)
    tokens = Sampler(50, "cpu").sample(torch.eye(3, 50), batch, histories).tokens
    assert tokens.tolist() == [7, 1, 7]


def test_parts_nobody_asked_for_are_absent():
    rows = SamplingRows(8, 1000, "cpu")
    rows.set(Case(resolved(temperature=0.0), stop_ids=(5,)).init(0))
    rows.set(Case(resolved(temperature=0.7)).init(1))
    rows.set(Case(resolved(temperature=0.7, top_k=50, logprobs=3)).init(2))
    rows.set(Case(resolved(top_k=300, top_p=0.5, presence_penalty=1.0)).init(3))
    greedy = rows.gather([0])
    assert [c.width for c in greedy.cohorts] == [GREEDY] and greedy.cohorts[0].samples is None
    assert not greedy.edits and greedy.logprobs is None
    plain = rows.gather([0, 1])
    assert sorted(c.width for c in plain.cohorts) == [UNFILTERED, GREEDY] and not plain.edits
    assert not any(c.any_top_p or c.any_min_p or c.any_sigma for c in plain.cohorts)
    mixed = rows.gather([0, 1, 2, 3])
    assert sorted(c.width for c in mixed.cohorts) == [UNFILTERED, GREEDY, 64, 1000]
    rows.set(Case(resolved(temperature=0.7, min_p=0.1)).init(4))
    assert sorted(c.width for c in rows.gather([1, 4]).cohorts) == [UNFILTERED, EVERYTHING]
    assert mixed.penalties is not None and mixed.penalties.host_samples == [3]
    assert mixed.logprobs is not None and mixed.logprobs.host_samples == [2] and mixed.logprobs.num_top == 3
    assert mixed.bias is None and mixed.dry is None and mixed.bad_words is None and mixed.min_tokens is None


def test_gather_is_remembered_until_a_row_changes():
    rows = SamplingRows(4, 100, "cpu")
    rows.set(Case(resolved()).init(0))
    rows.set(Case(resolved()).init(1))
    first = rows.gather([0, 1])
    assert rows.gather([0, 1]) is first
    assert rows.gather([1, 0]) is not first
    rows.set(Case(resolved(temperature=0.0)).init(0))
    assert len(rows.gather([0, 1]).cohorts) == 2
    rows.set(Case(resolved(logit_bias=((1, 1.0),))).init(0))
    rows.clear(0)
    rows.set(Case(resolved()).init(0))  # nothing of the last tenant is left
    assert not rows.gather([0, 1]).edits


def test_a_row_that_nobody_has_asks_for_nothing():
    """Padding is sampled with it, ahead of every request: kernels would be compiled that none may ever need."""
    rows = SamplingRows(4, 100, "cpu")
    never, nobodys = rows.gather([0, 0]), rows.gather([4, 4])
    rows.set(Case(resolved(temperature=0.8, top_k=5, logprobs=2, presence_penalty=1.0)).init(0))
    rows.clear(0)
    for batch in (never, nobodys, rows.gather([0, 0])):
        assert [cohort.width for cohort in batch.cohorts] == [GREEDY]
        assert not batch.edits and batch.edited is None and batch.logprobs is None
        assert batch.draws is not None and not batch.draws.any_filter


def test_nothing_to_sample():
    rows = SamplingRows(4, 100, "cpu")
    _, histories = set_up([Case(resolved())], 100)
    histories.rows, histories.lengths, histories.len_bounds = torch.zeros(0, dtype=torch.int64), torch.zeros(0), []
    batch = rows.gather([])
    host = to_host(Sampler(100, "cpu").sample(torch.zeros(0, 100), batch, histories), batch.logprobs)
    assert host.tokens == [] and host.bad == [] and host.logprobs == {}


class _NoWaiting(TorchDispatchMode):
    """Refuses every operator that would make the host wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique", "bincount", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in self.WAITS, name
        if name in ("index", "index_put", "index_put_"):
            assert not any(t is not None and t.dtype == torch.bool for t in args[1]), "boolean index"
        return func(*args, **(kwargs or {}))


def test_sampling_never_looks_at_a_value():
    rng = np.random.default_rng(3)
    names = ("temperature", "greedy", "top_k", "top_p", "min_p", "top_n_sigma", "repetition_penalty",
             "presence_penalty", "frequency_penalty", "dry", "logit_bias", "bad_words", "min_tokens")  # fmt: skip
    cases = [random_case(rng, 400, name) for name in names] + [random_case(rng, 400) for _ in range(10)]
    cases.append(Case(resolved(logprobs=4)))
    batch, histories = set_up(cases, 400)
    assert all(part is not None for part in (batch.bias, batch.penalties, batch.dry, batch.bad_words, batch.min_tokens))
    logits = torch.from_numpy(random_logits(rng, len(cases), 400))
    mask = torch.from_numpy(rng.random((len(cases), 400)) < 0.9)
    sampler = Sampler(400, "cpu")
    with _NoWaiting():
        sampler.sample(logits, batch, histories, mask)
    with _NoWaiting(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        logits.sum().item()
