"""The engine against a recurrent model's own plain scan, whatever the schedule; and the scores of prompts.

Every variant runs a ragged batch of 16 for 64 greedy tokens: chunks of 7, cold and warm prefixes, pools so small that
requests are pushed out by swap and by recompute, depth 1 and depth 2 on a device that finishes late. The families of
real models are in `families/`, where `transformers` is the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.recurrent_model import RecurrentModel
from tests.cpu.rig import load, make_engine, ragged_prompts, run
from tests.cpu.tiny_models import make_tiny

NUM_TOKENS = 64
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 7": {"chunk_tokens": 7},
    "chunks of 7, depth 2": {"chunk_tokens": 7, "depth": 2, "late": True},
    "swap": {"num_pages": 90, "preemption": "swap"},
    "swap, depth 2": {"num_pages": 90, "preemption": "swap", "depth": 2, "late": True, "chunk_tokens": 7},
    "recompute": {"num_pages": 90, "preemption": "recompute"},
    "recompute, depth 2": {"num_pages": 90, "preemption": "recompute", "depth": 2, "late": True, "chunk_tokens": 7},
    "no prefix cache": {"prefix_cache": False, "depth": 2, "late": True},
}


@dataclass
class Scanned:
    model: RecurrentModel
    prompts: list[list[int]]
    expected: list[list[int]]  # the tokens of its plain scan


@pytest.fixture(scope="module", params=[False, True])
def scanned(request: pytest.FixtureRequest) -> Scanned:
    """Once for all variants: the plain scan begins anew for every token."""
    model = RecurrentModel(hybrid=request.param)
    prompts = ragged_prompts(model.vocab_size)
    return Scanned(model, prompts, [model.plain_greedy(prompt, NUM_TOKENS) for prompt in prompts])


@pytest.mark.parametrize("variant", VARIANTS)
def test_recurrent_tokens_equal_the_plain_scan(scanned: Scanned, variant: str) -> None:
    model, prompts, expected = scanned.model, scanned.prompts, scanned.expected
    engine = make_engine(model, **VARIANTS[variant])
    assert run(engine, prompts) == expected
    if model.qkv is not None:  # pages may run out
        assert_pressed(engine, variant)
    assert run(engine, prompts) == expected, "with a warm prefix cache"
    if "no prefix" not in variant:
        assert engine.scheduler.cache.stats.hit_tokens > 0


def assert_pressed(engine: Any, variant: str) -> None:
    stats = engine.scheduler.stats
    assert ("swap" in variant) == (stats.swaps > 0)
    assert ("recompute" in variant) == (stats.recomputes > 0 and stats.swaps == 0)
    if "late" in VARIANTS[variant]:
        assert engine.workers.submitted_ahead > 20, "steps really were submitted before the last one's tokens existed"


def test_logits_equal_transformers(tmp_path: Path) -> None:
    """The distribution itself: the log-probability of every prompt token and of its best alternatives."""
    from quire.types import SamplingParams
    from tests.cpu.rig import run_deltas

    for name in ("llama", "mistral"):
        hf_model, folder = make_tiny(name, tmp_path / name)
        prompts = ragged_prompts(256)[8:]
        engine = make_engine(load(folder), chunk_tokens=7)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=5, logprobs=5)
        for warm in (False, True):
            for prompt, deltas in zip(prompts, run_deltas(engine, prompts, params), strict=True):
                with torch.inference_mode():
                    expected = hf_model(torch.tensor([prompt])).logits[0].log_softmax(-1)
                got = [r for d in deltas for r in d.prompt_logprobs or ()]
                assert [r.token_id for r in got] == prompt[1:], f"{name}, warm={warm}"
                for place, record in enumerate(got):
                    assert abs(record.logprob - expected[place, record.token_id].item()) < 1e-4
                    top = expected[place].topk(5)
                    torch.testing.assert_close(torch.tensor(record.top_logprobs), top.values, atol=1e-4, rtol=1e-4)
                last = deltas[-1].logprobs
                assert last is not None and abs(last[0].logprob - expected[-1].max().item()) < 1e-4


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_prompt_logprobs_come_once_whatever_happens(tmp_path: Path, preemption: str) -> None:
    """Pushed out in the middle of its prompt, a request computes it again, but tells it once."""
    from quire.types import SamplingParams
    from tests.cpu.rig import make_request

    model = load(make_tiny("llama", tmp_path)[1])
    prompt = ragged_prompts(256)[15]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    engine = make_engine(model, chunk_tokens=7, max_rows=2, num_pages=24, preemption=preemption, prefix_cache=False)
    engine.add(make_request("low", prompt, params, priority=5))
    found: dict[str, list[int]] = {"low": [], "high": []}
    turns = 0
    while engine.has_work:
        turns += 1
        if turns == 6:
            engine.add(make_request("high", prompt[::-1], params))
        for delta in engine.turn():
            found[delta.request_id] += [record.token_id for record in delta.prompt_logprobs or ()]
    assert engine.scheduler.stats.preemptions > 0
    assert found == {"low": prompt[1:], "high": prompt[::-1][1:]}
