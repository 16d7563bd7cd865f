"""Proves a family equal to `transformers` on the same weights, whatever the schedule: `CHECKS`, by name.

Each takes a case, raises where the family fails, and asserts that it forced what it is named after. `test_families`
runs them over every family, `table` tells readers which of them passed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from quire.cache.tree import ABSENT
from quire.config import Config
from quire.config_build import override_config
from quire.engine.costs.step_costs import StepCosts
from quire.engine.loop import Engine
from quire.engine.speculation.build import make_drafter
from quire.layers import experts
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.models.loading import loader
from quire.startup.assemble import build_model_engine
from quire.startup.cache_plan import memory_report
from quire.types import Request, SamplingParams
from tests.cpu.families.decoded import decode_into
from tests.cpu.families.fp8_in_torch import STORED, Fp8InTorch
from tests.cpu.families.harness import (
    CHUNK,
    GREEDY,
    NUM_TOKENS,
    PAGE_TOKENS,
    PROMPT_LENS,
    VOCAB,
    Case,
    Recorder,
    relative_error,
    run,
)
from tests.cpu.rig import CPU, load, make_request
from tests.pure.drafting import Oracle, RandomDrafter

LAST_ALONE = PROMPT_LENS[-1] - 1  # chunks of the longest prompt: its last token comes alone, perhaps by another path


def check_logits(case: Case) -> None:
    """All positions of a ragged, chunked batch to 1e-4 relative; the second time over what the cache kept."""
    rng = random.Random(3)
    num = len(PROMPT_LENS)
    prompts = [[rng.randrange(VOCAB // num) * num + i for _ in range(n)] for i, n in enumerate(PROMPT_LENS)]
    want = [case.reference_logits(prompt) for prompt in prompts]
    recorder = Recorder(case.model, num)
    engine = case.engine(recorder, chunk_tokens=CHUNK, max_batch_tokens=32)
    for warm in (False, True):
        recorder.logits_at.clear()
        run(engine, prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        for (prompt, position), got in recorder.logits_at.items():
            error = (got - want[prompt][position]).abs().max() / want[prompt].abs().max()
            assert error <= 1e-4, f"prompt {prompt}, position {position}, warm={warm}: {error:.1e}"
        assert warm == (len(recorder.logits_at) < sum(PROMPT_LENS)), "cold all positions, warm fewer"


def check_chunks(case: Case) -> None:
    """Prompts computed in pieces, among rows that decode."""
    engine, witness, tokens = case.first_run
    assert tokens == case.expected
    assert max(witness.chunks.values()) >= 60 // CHUNK and witness.mixed_steps > 3
    assert engine.scheduler.stats.preemptions == 0


def check_warm_prefix(case: Case) -> None:
    """The same prompts again, and longer ones: what was computed is not computed again, and nothing changes."""
    engine, _, tokens = case.first_run
    assert tokens == case.expected
    cold, hits = engine.scheduler.stats.computed_tokens, engine.scheduler.cache.stats.hit_tokens
    assert run(engine, case.prompts) == case.expected
    assert engine.scheduler.cache.stats.hit_tokens > hits
    assert engine.scheduler.stats.computed_tokens - cold < cold
    longer = [prompt + tokens[:20] for prompt, tokens in zip(case.prompts, case.expected, strict=True)]
    rest = [tokens[20:] for tokens in case.expected]
    short = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS - 20, ignore_eos=True)
    assert run(engine, longer, short) == rest


def run_pushing_out(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Half of the prompts run and decode; then the other half comes with a higher priority and takes their rows."""
    low = [make_request(f"low-{i}", prompt, GREEDY, priority=5) for i, prompt in enumerate(prompts)][::2]
    high = [make_request(f"high-{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)][1::2]
    for request in low:
        engine.add(request)
    coming = list(high)
    while engine.has_work:
        if coming and all(request.num_sampled >= 6 for request in low):
            for request in coming:
                engine.add(request)
            coming = []
        for delta in engine.turn():
            assert delta.error is None, delta.error
    engine.scheduler.check()
    return [(high if i % 2 else low)[i // 2].tokens[len(prompt) :] for i, prompt in enumerate(prompts)]


def _check_pushed_out(case: Case, preemption: str, depth: int) -> None:
    """At depth 1 nothing is kept in the tree, so that bytes really come back from the host or are computed again; at
    depth 2 the pool is also small."""
    more: dict[str, Any] = {"prefix_cache": False} if depth == 1 else {"num_pages": case.small_pool, "late": True}
    engine = case.engine(
        preemption=preemption,
        depth=depth,
        chunk_tokens=CHUNK,
        max_rows=len(case.prompts) // 2,
        order="priority",
        **more,
    )
    assert run_pushing_out(engine, case.prompts) == case.expected
    stats, computed_once = engine.scheduler.stats, sum(map(len, case.prompts)) + len(case.prompts) * (NUM_TOKENS - 1)
    assert stats.preemptions >= len(case.prompts) // 2
    if preemption == "swap":
        assert stats.swaps > 0 and engine.scheduler.cache.stats.swapped_in > 0
    else:
        assert stats.swaps == 0 and stats.recomputes > 0
    if depth == 1:
        assert (stats.computed_tokens == computed_once) == (preemption == "swap"), "swapped: nothing computed twice"
    else:
        assert engine.workers.submitted_ahead > 10, "steps really were submitted before the last one's tokens existed"


def check_swap(case: Case) -> None:
    """Victims go to the host and come back; nothing is computed twice."""
    _check_pushed_out(case, "swap", depth=1)


def check_host_memory(case: Case) -> None:
    """The device holds a few conversations; what it evicts goes to the host and comes back, in chunks and ragged."""
    knobs = {"num_pages": case.small_pool, "max_rows": 2, "chunk_tokens": CHUNK, "host_memory": 64 << 20}
    if case.model.specs[-1].kind == "state" or case.model.specs[0].kind == "state":
        knobs["num_slots"] = 6
    for depth in (1, 2):
        engine = case.engine(depth=depth, late=depth == 2, **knobs)
        stats = engine.scheduler.cache.stats
        for warm in (False, True):
            assert run(engine, case.prompts) == case.expected, f"depth {depth}, warm={warm}"
        assert stats.evicted_units > 0 and stats.loaded_tokens > 0, "nothing came back from the host"
        computed = engine.scheduler.stats.computed_tokens
        assert run(engine, case.prompts[-1:]) == case.expected[-1:]
        most = len(case.prompts[-1]) + NUM_TOKENS - 1
        assert engine.scheduler.stats.computed_tokens - computed < most, "some of it was there"


def check_recompute(case: Case) -> None:
    """Victims give all back and compute it again."""
    _check_pushed_out(case, "recompute", depth=1)


def check_overlap(case: Case) -> None:
    """Depth 2 on a device that finishes late, cold and warm."""
    engine = case.engine(chunk_tokens=CHUNK, depth=2, late=True)
    assert run(engine, case.prompts) == case.expected
    hits = engine.scheduler.cache.stats.hit_tokens
    assert run(engine, case.prompts) == case.expected
    assert engine.scheduler.cache.stats.hit_tokens > hits
    assert engine.workers.submitted_ahead > 20


def check_overlap_swap(case: Case) -> None:
    """Depth 2, a small pool, by swap."""
    _check_pushed_out(case, "swap", depth=2)


def check_overlap_recompute(case: Case) -> None:
    """Depth 2, a small pool, by recompute."""
    _check_pushed_out(case, "recompute", depth=2)


def check_memory(case: Case) -> None:
    """What `quire doctor` says before anything is loaded is what is then allocated. Windows give their pages back."""
    config = override_config(Config(), {"model": str(case.folder), "cache_memory": 1 << 22, "max_rows": 4,
                                        "page_tokens": PAGE_TOKENS, "dtype": "float32"})  # fmt: skip
    said = memory_report(config)
    engine, _ = build_model_engine(case.model, config, said.max_model_len, CPU)
    caches = sum(tensor.nbytes for tensor in engine.workers.inner.store.tensors.values())
    weights = sum({tensor.data_ptr(): tensor.nbytes for tensor in _weights(case.model)}.values())
    assert abs(said.cache - caches) <= 0.02 * caches
    assert abs(said.weights - weights) <= 0.02 * weights
    windows = {group: spec.window for group, spec in enumerate(case.model.specs) if spec.window is not None}
    if windows:
        _check_windows(case, windows)


def _weights(model: Any) -> Iterator[torch.Tensor]:
    """Parameters, and matrices packed for the native kernels, which are lists where a parameter was."""
    yield from model.parameters()
    for module in model.modules():
        packed = getattr(module, "weight", None)
        if isinstance(packed, list):
            yield from (matrix.memory for matrix in packed)


def _check_windows(case: Case, windows: dict[int, int]) -> None:
    """No page is held that no coming token can see, but for the one it begins in."""
    engine = case.engine(chunk_tokens=CHUNK, prefix_cache=False)
    cache = engine.scheduler.cache
    request = make_request("long", case.prompts[-1], GREEDY)
    engine.add(request)
    while engine.has_work:
        engine.turn()
        for group, window in windows.items():
            held = sum(unit != ABSENT for unit in request.lease.units[group]) if request.lease else 0
            assert held <= (window + CHUNK) // PAGE_TOKENS + 2, f"{held} pages for a window of {window}"
            pool = cache.pools[group]
            assert pool.num_units - 1 - pool.num_free <= held + 2, "what fell out is free again, or soon will be"
    assert len(request.tokens) > 2 * max(windows.values()) + CHUNK


def check_float16(case: Case) -> None:
    """Weights in float16 on a CPU: the logits of those weights, which are nearly those of the checkpoint."""
    kept: Any = load(case.folder, PAGE_TOKENS, dtype="float16")
    exact: Any = load(case.folder, PAGE_TOKENS, kernels="torch")
    assert "F16" in decode_into(exact, kept)
    got = case.logits(kept, LAST_ALONE)
    assert relative_error(got, case.logits(exact, LAST_ALONE)) <= 1e-4
    moved = relative_error(got, case.reference_logits(case.prompts[-1]))
    assert 1e-7 < moved <= 0.05, "other bits give other logits, but not much"


def check_fp8(case: Case) -> None:
    """Linear layers and experts through the FP8 scheme, with kernels in CUDA's place that keep all bits: the same
    logits."""
    scheme = (torch.float32, Fp8InTorch())
    some_rows = patch.object(experts, "SCALED_AT_ONCE", 1000)
    with patch.object(loader, "_choose_scheme", lambda *unused: scheme), some_rows:
        model: Any = load(case.folder, PAGE_TOKENS, kernels="torch")
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert sum(linear.weight.dtype == STORED for linear in linears) > len(linears) / 2
    mixtures = [module for module in model.modules() if isinstance(module, Experts)]
    assert all(mixture.gate_up.dtype == mixture.down.dtype == STORED for mixture in mixtures)
    assert relative_error(case.logits(model, LAST_ALONE), case.reference_logits(case.prompts[-1])) <= 1e-4


def known_answers(prompts: list[list[int]], answers: list[list[int]]) -> Oracle:
    """What a request will sample, looked up by what it has: the answers of a run without drafts."""
    whole = [prompt + tokens for prompt, tokens in zip(prompts, answers, strict=True)]

    def oracle(request: Request, tokens: list[int]) -> int:
        seen = request.tokens + tokens
        found = next((one for one in whole if one[: len(seen)] == seen and len(one) > len(seen)), None)
        return 0 if found is None else found[len(seen)]

    return oracle


def check_speculation(case: Case) -> None:
    """Drafts that are right now and then, sometimes none: at depth 1 in chunks and over a warm prefix, at depth 2 with
    victims that go to the host."""
    oracle = known_answers(case.prompts, case.expected)
    for depth in (1, 2):
        drafter = RandomDrafter(random.Random(depth), right=0.75, silent=0.2, oracle=oracle, vocab=VOCAB, waits=0.7)
        more: dict[str, Any] = {} if depth == 1 else {"num_pages": case.small_pool, "late": True, "preemption": "swap",
                                                      "max_rows": len(case.prompts) // 2}  # fmt: skip
        engine = case.engine(chunk_tokens=CHUNK, depth=depth, drafter=drafter, order="priority", **more)
        for _ in range(2 if depth == 1 else 0):
            assert run(engine, case.prompts) == case.expected
        if depth == 2:
            assert run_pushing_out(engine, case.prompts) == case.expected
            assert engine.scheduler.stats.swaps > 0
        assert drafter.num_partial >= 3 and drafter.num_accepted > 30 and not drafter.open


def check_proposers(case: Case) -> None:
    """Drafts of each proposer of the host, greedy and seeded, at depth 1 and on a late device at depth 2."""
    greedy = replace(GREEDY, max_tokens=32)
    params = [replace(greedy, temperature=0.8 * (i % 2), top_p=0.95, seed=i) for i in range(len(case.prompts))]
    prompts = [prompt * 3 if len(prompt) < 10 else prompt for prompt in case.prompts]
    expected = run(case.engine(), prompts, params)
    predicted = [
        replace(each, prediction_ids=tuple(3 if place % 10 == 9 else token for place, token in enumerate(tokens)))
        for each, tokens in zip(params, expected, strict=True)
    ]
    num_verified = 0
    with patch.object(StepCosts, "seconds", lambda self, num_tokens, num_keys: 1 + 0.01 * num_tokens):
        for place, name in enumerate(("suffix", "prediction", "prompt", "ngram")):
            drafter = make_drafter(name, replays=any(spec.kind == "state" for spec in case.model.specs))
            assert drafter is not None
            engine = case.engine(chunk_tokens=CHUNK, drafter=drafter, depth=1 + place % 2, late=place % 2 == 1)
            each = predicted if name == "prediction" else params
            assert run(engine, prompts, each) == expected, name
            counts = drafter.stats().by_name(name)
            num_verified += sum(counts.verified)
            assert sum(counts.accepted) > 20 or name != "prediction"
    assert num_verified > 50


CHECKS: dict[str, Callable[[Case], None]] = {
    "logits": check_logits,
    "chunks": check_chunks,
    "warm prefix": check_warm_prefix,
    "swap": check_swap,
    "host memory": check_host_memory,
    "recompute": check_recompute,
    "depth 2": check_overlap,
    "depth 2, swap": check_overlap_swap,
    "depth 2, recompute": check_overlap_recompute,
    "speculation": check_speculation,
    "proposers": check_proposers,
    "memory": check_memory,
    "float16": check_float16,
    "fp8": check_fp8,
}
