"""Speculation on a GPU: the same tokens with drafts as without, every step with drafts replayed from a graph, and no
wait of the host that a step without drafts has not."""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from quire.engine.costs.step_costs import StepCosts
from quire.engine.speculation.build import make_drafter
from quire.models.drafting import DraftModel
from quire.startup.draft_network import LoadedDraft
from quire.types import SamplingParams
from tests.cpu.families.checks import known_answers
from tests.cpu.families.harness import all_families, save_checkpoint
from tests.cpu.rig import load, make_engine, ragged_prompts, run, run_deltas
from tests.gpu.script import DEVICE, ON_GPU, marks, run_file
from tests.gpu.test_engine import MIXED_PARAMS, PAGED, SHAPES, folder, on_device, same_streams
from tests.gpu.test_syncs import watched
from tests.pure.drafting import RandomDrafter

pytestmark = marks()

PROMPTS = ragged_prompts(256)
PARAMS = [MIXED_PARAMS[index % len(MIXED_PARAMS)] for index in range(len(PROMPTS))]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * len(PROMPTS)
VARIANTS: dict[str, dict[str, Any]] = {
    "depth 1": {"depth": 1},
    "depth 2": {},
    "chunks of 7": {"chunk_tokens": 7},
    "swap": {"num_pages": 40, "preemption": "swap", "chunk_tokens": 7},
    "recompute": {"num_pages": 40, "preemption": "recompute"},
}
HYBRIDS = ("qwen3_next", "kimi_linear", "lfm2")


def guessing(prompts: list[list[int]], answers: list[list[int]], waits: float = 0.8) -> RandomDrafter:
    """A drafter that is right at four of five tokens, and sometimes silent."""
    oracle = known_answers(prompts, answers)
    return RandomDrafter(random.Random(1), right=0.8, silent=0.2, oracle=oracle, vocab=256, waits=waits)


def engine_with(model: Any, drafter: Any, **knobs: Any) -> Any:
    return make_engine(model, device=DEVICE, drafter=drafter, speculate="ngram", **{**PAGED, **knobs})


def graphs_of(engine: Any) -> Any:
    return engine.workers.inner._verify


def test_tokens_are_those_without_speculation() -> None:
    for shape in SHAPES:
        model = on_device(shape)
        for kind, params in (("greedy", GREEDY), ("sampled", PARAMS)):
            expected = run(make_engine(model, device=DEVICE, **PAGED), PROMPTS, params)
            for variant, knobs in VARIANTS.items():
                drafter = guessing(PROMPTS, expected)
                engine = engine_with(model, drafter, **knobs)
                what = f"{shape}: {kind}, {variant}"
                same_streams(run(engine, PROMPTS, params), expected, what)
                assert drafter.num_accepted > 100 and drafter.num_partial > 5, what
                print(f"{what}: {drafter.num_accepted} of {drafter.num_drafts} drafts accepted")


def test_in_the_deterministic_mode_every_bit_is_the_same() -> None:
    params = [replace(one, logprobs=2) for one in PARAMS]
    for shape in SHAPES:
        how = {"deterministic": True} if ON_GPU else {"kernels": "torch", "deterministic": True}
        model: Any = load(folder(shape), 16, DEVICE, **how)
        answers = [run_deltas(make_engine(model, device=DEVICE, deterministic=True, **PAGED), PROMPTS, params)]
        tokens = [[token for delta in one for token in delta.token_ids] for one in answers[0]]
        drafter = guessing(PROMPTS, tokens)
        answers.append(run_deltas(engine_with(model, drafter, deterministic=True), PROMPTS, params))
        off, on = ([[(list(d.token_ids), d.logprobs) for d in one] for one in each] for each in answers)
        off_tokens, on_tokens = ([[t for ids, _ in one for t in ids] for one in each] for each in (off, on))
        off_records, on_records = ([[r for _, rs in one for r in rs or ()] for one in each] for each in (off, on))
        assert on_tokens == off_tokens and on_records == off_records, shape
        assert drafter.num_accepted > 100, shape
        print(f"{shape}: the same bits, {drafter.num_accepted} drafts accepted")


def test_prepared_graphs_are_replayed_for_every_step_with_drafts() -> None:
    """None is missed: those of drafts alone, and those beside prompts where few rows have drafts."""
    if not ON_GPU:
        return
    for shape in SHAPES:
        model = on_device(shape)
        expected = run(make_engine(model, device=DEVICE, **PAGED), PROMPTS, PARAMS)
        drafter = guessing(PROMPTS, expected, waits=1.0)
        engine = engine_with(model, drafter)
        engine.prepare()
        graphs, mixed = graphs_of(engine), engine.workers.inner._mixed
        beside: list[bool] = []

        def seen(plan: Any, inner: Any = mixed.run, beside: list[bool] = beside, **how: Any) -> Any:
            computed = inner(plan, **how)
            if plan.drafts:
                beside.append(computed is not None)
            return computed

        too_large: list[int] = []

        def fits(plan: Any, inner: Any = graphs.fits, too_large: list[int] = too_large) -> bool:
            found: bool = inner(plan)
            if plan.drafts and not found and all(row.count == 1 + row.num_drafts for row in plan.rows):
                too_large.append(plan.num_tokens)
            return found

        mixed.run, graphs.fits = seen, fits
        same_streams(run(engine, PROMPTS, PARAMS), expected, f"{shape}: prepared")
        print(
            f"{shape}: {graphs.num_replayed} replayed, {graphs.num_eager} missed; "
            f"{sum(beside)} of {len(beside)} beside prompts"
        )
        assert graphs.num_replayed > 10 and graphs.num_eager == 0 and not too_large, shape


def test_hybrids_replay_what_was_accepted() -> None:
    families = {family.name: family for family in all_families()}
    for kind in HYBRIDS:
        path = Path(tempfile.mkdtemp(prefix="quire-gpu-test-"))
        save_checkpoint(families[kind], path)
        model = load(path, 16, DEVICE)
        prompts = [[token % 100 + 3 for token in prompt] for prompt in PROMPTS]
        expected = run(make_engine(model, device=DEVICE, **PAGED), prompts, GREEDY)
        drafter = guessing(prompts, expected)
        engine = engine_with(model, drafter)
        assert graphs_of(engine) is None
        same_streams(run(engine, prompts, GREEDY), expected, kind)
        assert drafter.num_accepted > 50 and drafter.num_partial > 5, kind


def test_a_draft_model_on_the_device() -> None:
    """As its own draft model a model is nearly always right."""
    model = on_device("llama, 4/2 heads of 64")
    expected = run(make_engine(model, device=DEVICE, **PAGED), PROMPTS, PARAMS)
    draft = LoadedDraft("draft", DraftModel(model, "draft"), 0)
    with patch.object(StepCosts, "seconds", lambda self, num_tokens, num_keys: 1 + 0.01 * num_tokens):
        engine = make_engine(
            model,
            device=DEVICE,
            draft=draft,
            drafter=make_drafter("draft:x", "draft"),
            **{**PAGED, "speculate": "draft:x"},
        )
        same_streams(run(engine, PROMPTS, PARAMS), expected, "its own draft model")
    counts = engine.scheduler._drafts.drafter.stats().by_name("draft")
    print(f"{sum(counts.accepted)} of {sum(counts.verified)} drafts accepted")
    assert sum(counts.accepted) > 0.8 * sum(counts.verified) > 30


def test_drafts_add_no_wait() -> None:
    if not ON_GPU:
        return
    model = load(folder("qwen3, 8/2 heads of 128, QK norm"), 16, DEVICE, dtype="bfloat16")
    for kind, params in (("greedy", GREEDY), ("sampled", PARAMS)):
        expected = run(make_engine(model, device=DEVICE, **PAGED), PROMPTS, params)
        engine = engine_with(model, guessing(PROMPTS, expected))
        engine.prepare()
        run(engine, PROMPTS, params)  # what compiles at first sight has been
        before = engine.scheduler.stats.steps
        with watched() as waits:
            run(engine, PROMPTS, params)
        steps = engine.scheduler.stats.steps - before
        events = waits.pop("event", 0)
        print(f"{kind}: {steps} steps, {events} waits for tokens, others: {dict(waits) or 'none'}")
        assert events <= steps and not waits, f"the host waited elsewhere: {dict(waits)}"


if __name__ == "__main__":
    run_file(globals(), *sys.argv[1:2])
