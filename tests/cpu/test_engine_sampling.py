"""Sampling through the whole engine: right distributions in a full batch at depth 2, and seeds that hold."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from quire.layers.step import Step
from quire.types import CacheSpec, SamplingParams
from tests.cpu.rig import load, make_engine, make_request, run
from tests.cpu.sampling_reference import distribution
from tests.cpu.tiny_models import make_tiny

SEED = int(os.environ.get("TEST_SEED", "11"))
VOCAB = 24
DRAWS = 1200
HISTORY = [3, 5, 7, 5, 9, 3, 5]  # repeats itself, for penalties and DRY
PROMPT_LEN = 4  # the rest counts as output: what a request that was resumed looks like

CASES: dict[str, SamplingParams] = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "temperature 1.7": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(temperature=1.0, top_k=5),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "top_n_sigma": SamplingParams(temperature=1.5, top_n_sigma=1.0),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.8),
    "presence": SamplingParams(temperature=1.0, presence_penalty=1.0),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=0.7),
    "DRY": SamplingParams(temperature=1.0, dry_multiplier=1.0, dry_base=1.75, dry_allowed_len=1),
    "logit bias": SamplingParams(temperature=1.0, logit_bias=((2, 2.0), (4, -np.inf), (6, -1.0))),
    "bad words": SamplingParams(temperature=1.0, bad_token_ids=((1,), (3, 5, 8), (9, 2))),
    "stop ids, min_tokens": SamplingParams(temperature=1.0, stop_token_ids=(0, 5), min_tokens=4),
    "everything": SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.2,
                                 presence_penalty=0.3, logit_bias=((10, 1.0),)),
}  # fmt: skip


class FixedLogits:
    """A model without a memory: every position has the same logits."""

    vocab_size, max_positions, activation_elements = VOCAB, 256, 8
    specs = (CacheSpec("full", "paged", (0,), (1, 1), "float32", page_tokens=4),)

    def __init__(self, seed: int):
        self.values = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        return step.wanted(torch.zeros(len(step.tokens), 1))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.values.expand(len(hidden), -1).clone()


def test_every_parameter_draws_from_its_reference_distribution() -> None:
    """All cases share each step: 32 rows, depth 2, a late device."""
    print(f"seed {SEED}")
    model = FixedLogits(SEED)
    engine = make_engine(
        model, max_rows=32, max_batch_tokens=256, depth=2, late=True, num_pages=2000, max_waiting=100_000
    )
    counts: dict[str, Counter[int]] = {name: Counter() for name in CASES}
    for draw in range(DRAWS):
        for name, params in CASES.items():
            request = make_request(
                f"{name}/{draw}", HISTORY, replace(params, max_tokens=4, seed=SEED * 100_003 + draw),
                stop_ids=frozenset(params.stop_token_ids),
            )  # fmt: skip
            request.prompt_len, request.max_len = PROMPT_LEN, len(HISTORY) + 1
            request.arrival = float(draw)
            engine.add(request)
    widest = 0
    while engine.has_work:
        for delta in engine.turn():
            counts[delta.request_id.split("/")[0]].update(delta.token_ids)
        widest = max(widest, len(engine.scheduler.running))
    assert widest == 32
    for name, params in CASES.items():
        expected = distribution(
            model.values.numpy().astype(np.float64), params.resolve(), HISTORY[:PROMPT_LEN], HISTORY[PROMPT_LEN:],
            params.stop_token_ids,
        )  # fmt: skip
        observed = np.array([counts[name][token] for token in range(VOCAB)])
        assert observed.sum() == DRAWS
        assert not observed[expected == 0].any(), f"{name}: drew what can't be drawn"
        common = expected * DRAWS >= 5
        seen = np.append(observed[common], observed[~common].sum())
        wanted = np.append(expected[common], expected[~common].sum()) * DRAWS
        seen, wanted = seen[wanted > 0], wanted[wanted > 0]
        p_value = stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue if len(seen) > 1 else 1.0
        assert p_value > 1e-4, f"{name}: p={p_value:.2g}, seed {SEED}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> object:
    _, folder = make_tiny("qwen3", Path(tmp_path_factory.mktemp("qwen3")))
    return load(folder)


SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=1234, max_tokens=40, presence_penalty=0.2)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"chunk_tokens": 5},
        {"depth": 2, "late": True},
        {"num_pages": 120, "preemption": "swap", "chunk_tokens": 7},
        {"num_pages": 120, "preemption": "swap", "depth": 2, "late": True},
        {"num_pages": 120, "preemption": "recompute", "depth": 2, "late": True},
    ],
    ids=str,
)
def test_a_seeded_request_gives_the_same_tokens_whatever_surrounds_it(tiny: object, knobs: dict) -> None:
    """Alone, in a batch of 32 with other parameters, preempted and resumed."""
    prompt = [17, 4, 90, 33, 12, 80, 7, 7, 101]
    alone = run(make_engine(tiny), [prompt], SAMPLED)[0]
    others = [[(13 * i + j) % 250 + 3 for j in range(1 + i % 19)] for i in range(31)]
    params = [SamplingParams(temperature=0.5 + 0.05 * i, top_k=i, seed=i, max_tokens=20 + i) for i in range(31)]
    engine = make_engine(tiny, max_rows=32, **{"max_batch_tokens": 96, **knobs})
    order = [*others[:20], prompt, *others[20:]]
    each = [*params[:20], SAMPLED, *params[20:]]
    assert run(engine, order, each)[20] == alone
    if "num_pages" in knobs:
        stats_ = engine.scheduler.stats
        assert (stats_.swaps if knobs["preemption"] == "swap" else stats_.recomputes) > 0
    assert run(engine, [prompt], SAMPLED)[0] == alone, "and from a warm prefix"


def test_samples_of_one_prompt_differ_and_repeat(tiny: object) -> None:
    def samples() -> list[list[int]]:
        engine = make_engine(tiny, depth=2, late=True)
        for index in range(4):
            engine.add(make_request(f"s{index}", [5, 6, 7, 8, 9], SAMPLED, sample_index=index))
        tokens: dict[str, list[int]] = {f"s{i}": [] for i in range(4)}
        for delta in engine.run_until_idle():
            tokens[delta.request_id] += delta.token_ids
        return list(tokens.values())

    first = samples()
    assert len({tuple(tokens) for tokens in first}) == 4
    assert samples() == first
