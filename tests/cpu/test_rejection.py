"""Verification by rejection: the distribution of the tokens is the model's, whatever the drafts and what drew them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from quire import QuireError, SamplingParams
from quire.config import Config
from quire.config_build import override_config
from quire.engine.speculation.build import make_drafter
from quire.models.drafting import DraftModel
from quire.sampling.batch import Histories
from quire.sampling.noise import Noise, stream_key
from quire.sampling.rejection import DRAFT_SALT, choose_tokens_by_rejection, one_hot
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import processed_logits
from quire.startup.draft_network import LoadedDraft
from quire.types import RowInit, pack_tokens
from tests.cpu.rig import load, make_engine, run_deltas
from tests.cpu.tiny_models import make_tiny
from tests.pure.drafting import RandomDrafter

VOCAB, DRAWS = 12, 20_000
PARAMS = {
    "temperature": SamplingParams(temperature=0.7),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7),
    "min-p": SamplingParams(temperature=1.3, min_p=0.15),
}
KEYS = torch.tensor([stream_key(seed, 0) for seed in range(DRAWS)])
POSITIONS = torch.arange(DRAWS) % 50 + 7


def processed(logits: Tensor, params: SamplingParams) -> Tensor:
    """One row of logits after the filters of `params`."""
    rows = SamplingRows(1, VOCAB, "cpu")
    rows.set(RowInit("r", 0, pack_tokens([1]), 1, 0, params.resolve(), (), 0, 0))
    history = Histories(torch.ones(2, 4, dtype=torch.int32), torch.tensor([0]), torch.tensor([1]), [1])
    return processed_logits(logits[None], rows.gather([0]), history)


def is_drawn_from(counts: np.ndarray, p: np.ndarray) -> None:
    p = p.astype(np.float64)
    assert counts[p == 0].sum() == 0
    likely = p > 0
    assert stats.chisquare(counts[likely], p[likely] / p[likely].sum() * counts.sum()).pvalue > 1e-4


def random_pair(name: str) -> tuple[Tensor, Tensor]:
    """Processed logits of a model, and of a draft network that half agrees with it."""
    generator = torch.Generator().manual_seed(sorted(PARAMS).index(name))
    model = torch.randn(VOCAB, generator=generator) * 1.5
    draft = model + torch.randn(VOCAB, generator=generator)
    return processed(model, PARAMS[name]), processed(draft, PARAMS[name])


@pytest.mark.parametrize("name", PARAMS)
def test_drawn_drafts_leave_the_distribution_of_the_model(name: str) -> None:
    model, draft = random_pair(name)
    noise, q = Noise(VOCAB, "cpu"), torch.softmax(draft, 1).expand(DRAWS, -1)
    drafts = (draft + noise.gumbel(KEYS ^ DRAFT_SALT, POSITIONS)).argmax(1)
    is_drawn_from(torch.bincount(drafts, minlength=VOCAB).numpy(), q[0].numpy())
    chosen = choose_tokens_by_rejection(noise, model.expand(DRAWS, -1), drafts, q, KEYS, POSITIONS)
    p = torch.softmax(model, 1)[0]
    is_drawn_from(torch.bincount(chosen, minlength=VOCAB).numpy(), p.numpy())
    agreement = torch.minimum(p, q[0]).sum().item()
    accepted = (chosen == drafts).float().mean().item()
    assert abs(accepted - agreement) < 0.02, "as often as the rule accepts, which no rule exceeds"


@pytest.mark.parametrize("name", PARAMS)
def test_drafts_that_nothing_drew_leave_it_too(name: str) -> None:
    """A draft from an n-gram, likely, unlikely or impossible."""
    model, _ = random_pair(name)
    p = torch.softmax(model, 1)[0]
    for token in (int(p.argmax()), int(p.argmin()), 3):
        drafts = torch.full((DRAWS,), token)
        chosen = choose_tokens_by_rejection(
            Noise(VOCAB, "cpu"), model.expand(DRAWS, -1), drafts, one_hot(drafts, VOCAB), KEYS, POSITIONS
        )
        is_drawn_from(torch.bincount(chosen, minlength=VOCAB).numpy(), p.numpy())


def test_shared_noise_would_bias_it() -> None:
    """The test can fail: with the draft's noise in the place of the replacement's the distribution is another."""
    model, draft = random_pair("temperature")
    noise, q = Noise(VOCAB, "cpu"), torch.softmax(draft, 1).expand(DRAWS, -1)
    drafts = (draft + noise.gumbel(KEYS, POSITIONS)).argmax(1)
    p = torch.softmax(model, 1)[0]
    rest = (p - q[0]).clamp(min=0).log().expand(DRAWS, -1)
    replaced = (rest + noise.gumbel(KEYS, POSITIONS)).argmax(1)
    accepted = torch.rand(DRAWS, generator=torch.Generator().manual_seed(1)) < (p[drafts] / q[0][drafts])
    counts = torch.bincount(torch.where(accepted, drafts, replaced), minlength=VOCAB).numpy()
    with pytest.raises(AssertionError):
        is_drawn_from(counts, p.numpy())


def test_greedy_rows_take_the_argmax() -> None:
    model = processed(torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)), SamplingParams(temperature=0.0))
    best = int(model.argmax())
    for token in (best, (best + 1) % VOCAB):
        drafts = torch.full((100,), token)
        q = one_hot(drafts, VOCAB)
        chosen = choose_tokens_by_rejection(
            Noise(VOCAB, "cpu"), model.expand(100, -1), drafts, q, KEYS[:100], POSITIONS[:100]
        )
        assert (chosen == best).all()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("rejection")
    return tuple(load(make_tiny("llama", folder / str(seed), seed=seed)[1]) for seed in (0, 1))  # type: ignore[return-value]


class Leaning(DraftModel):
    """The model itself with other preferences: a draft network that half agrees with it."""

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits + torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(2))


NUM_REQUESTS, TOP = 1500, 3
PROMPT = [5, 9, 17, 4]


def expected_triples(model: Any, temperature: float) -> dict[tuple[int, ...], float]:
    """The probability of each first three tokens, from the model's own logits."""
    engine = make_engine(model)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=TOP)

    def step(tokens: list[int]) -> dict[int, float]:
        (deltas,) = run_deltas(engine, [PROMPT + tokens], params, check=False)
        record = deltas[0].logprobs[0]  # type: ignore[index]
        scores = torch.tensor(record.top_logprobs, dtype=torch.float64) / temperature
        return dict(zip(record.top_ids, torch.softmax(scores, 0).tolist(), strict=True))

    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        found = {
            (*tokens, token): before * chance
            for tokens, before in found.items()
            for token, chance in step(list(tokens)).items()
        }
    assert len(found) == len(list(product(range(TOP), repeat=3)))
    return found


@pytest.mark.parametrize("source", ["draft model", "guesses"])
def test_tokens_of_the_engine_have_the_models_distribution(models: tuple[Any, Any], source: str) -> None:
    """Of drafts that a draft model draws, and of such that nobody draws, at depth 2."""
    model, _ = models
    temperature = 2.0
    params = [SamplingParams(temperature=temperature, top_k=TOP, seed=i, max_tokens=6) for i in range(NUM_REQUESTS)]
    expected = expected_triples(model, temperature)
    rng = random.Random(3)
    if source == "draft model":
        how: dict[str, Any] = {
            "draft": LoadedDraft("draft", Leaning(model, "leaning"), 0),
            "drafter": RandomDrafter(rng, proposing=True, silent=0.1, longest=3, right=0.0),
        }
    else:
        firsts = [token for token, _ in zip(sorted({t for key in expected for t in key}), range(9), strict=False)]
        guesses = RandomDrafter(rng, right=1.0, silent=0.1, longest=2, oracle=lambda r, t: rng.choice(firsts))
        how = {"drafter": guesses}
    engine = make_engine(model, verify="rejection", depth=2, late=True, max_rows=32, max_batch_tokens=256, **how)
    deltas = run_deltas(engine, [PROMPT] * NUM_REQUESTS, params, check=False)
    seen = Counter(tuple([t for delta in one for t in delta.token_ids][:3]) for one in deltas)
    counts = np.array([seen[key] for key in expected])
    assert counts.sum() == NUM_REQUESTS
    is_drawn_from(counts, np.array(list(expected.values())))
    assert how["drafter"].num_drafts > NUM_REQUESTS and how["drafter"].num_accepted > 100


def test_greedy_tokens_are_those_without_drafts(models: tuple[Any, Any]) -> None:
    model, other = models
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
    expected = run_deltas(make_engine(model), [PROMPT, PROMPT[::-1]], params, check=False)
    engine = make_engine(model, verify="rejection", draft=LoadedDraft("draft", DraftModel(other, "other"), 0),
                         drafter=make_drafter("draft:x", "draft", "rejection"))  # fmt: skip
    got = run_deltas(engine, [PROMPT, PROMPT[::-1]], params, check=False)
    for one, another in zip(got, expected, strict=True):
        assert [t for d in one for t in d.token_ids] == [t for d in another for t in d.token_ids]
        assert [r.token_id for d in one for r in d.logprobs or []] == [t for d in one for t in d.token_ids]


def test_an_unknown_way_to_verify_is_refused() -> None:
    with pytest.raises(QuireError, match="verify"):
        override_config(Config(), {"verify": "typical"})
