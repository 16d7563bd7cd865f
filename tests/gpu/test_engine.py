"""The whole engine on a GPU, in float32, against itself on the CPU: the same greedy tokens whatever the schedule.

The CPU engine is proven equal to `transformers` in `tests/cpu/test_engine_equivalence.py`. Where two logits are equal
to the last digits the devices may pick different ones; such a tie must be one by the CPU's own figures, and is rare.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from quire.runtime.graphs import CapturePool, capture_graph
from quire.types import SamplingParams
from tests.cpu.rig import load, make_engine, ragged_prompts, run, run_deltas
from tests.cpu.tiny_models import make_tiny
from tests.gpu.script import DEVICE, ON_GPU, marks, run_file

pytestmark = marks()

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, 4/2 heads of 64": ("llama", {"head_dim": 64}),
    "qwen3, 8/2 heads of 128, QK norm": (
        "qwen3",
        {"head_dim": 128, "num_attention_heads": 8, "hidden_size": 256, "intermediate_size": 512},
    ),
    "mistral, 4/1 heads of 64, window 40": (
        "mistral",
        {"head_dim": 64, "num_key_value_heads": 1, "sliding_window": 40},
    ),
    "smollm2, 9/3 heads of 64, tied": (
        "smollm2",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 2},
    ),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
TIE = 1e-3  # of a logprob: below this float32 sums in another order may decide
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "depth 1": {"depth": 1},
    "chunks of 7": {"chunk_tokens": 7},
    "swap": {"num_pages": 30, "preemption": "swap", "chunk_tokens": 7},
    "recompute": {"num_pages": 30, "preemption": "recompute", "chunk_tokens": 7},
    "recompute, depth 1, no graphs": {"num_pages": 30, "preemption": "recompute", "depth": 1, "graphs": False},
}
PAGED = {"page_tokens": 16, "max_batch_tokens": 128, "max_rows": 16, "depth": 2}


@functools.cache
def folder(shape: str) -> Path:
    family, fields = SHAPES[shape]
    path = Path(tempfile.mkdtemp(prefix="quire-gpu-test-"))
    make_tiny(family, path, **fields)
    return path


@functools.cache
def on_device(shape: str) -> Any:
    return load(folder(shape), 16, DEVICE, strict_kernels=True)


@functools.cache
def expected(shape: str) -> list[list[tuple[int, float, list[int]]]]:
    """Per prompt and place: the token, its lead over the second in logprob, and the best two."""
    engine = make_engine(load(folder(shape), 16), **{**PAGED, "depth": 1})
    params = SamplingParams(temperature=0.0, max_tokens=GREEDY.max_tokens, ignore_eos=True, logprobs=2)
    found = []
    for deltas in run_deltas(engine, ragged_prompts(256), params):
        records = [record for delta in deltas for record in delta.logprobs or ()]
        found.append([(r.token_id, r.top_logprobs[0] - r.top_logprobs[1], r.top_ids[:2]) for r in records])
    return found


def engine_on_device(shape: str, **knobs: Any) -> Any:
    return make_engine(on_device(shape), device=DEVICE, **{**PAGED, **knobs})


def count_ties(got: list[list[int]], want: list[list[tuple[int, float, list[int]]]], what: str) -> int:
    ties = 0
    for row, (tokens, truth) in enumerate(zip(got, want, strict=True)):
        assert len(tokens) == len(truth), f"{what}: row {row} has {len(tokens)} tokens"
        for place, (token, (true, lead, best)) in enumerate(zip(tokens, truth, strict=True)):
            if token != true:
                assert lead < TIE and token in best, f"{what}: row {row}, token {place}: {token}, not {true} ({lead=})"
                ties += 1
                break  # from here on it is another text
    return ties


def test_greedy_tokens_equal_the_cpus() -> None:
    prompts = ragged_prompts(256)
    for shape in SHAPES:
        for variant, knobs in VARIANTS.items():
            knobs = dict(knobs)
            if "num_pages" in knobs and "window" in shape:
                knobs["num_pages"] = 22  # a window gives pages back, so it takes less to run out
            engine = engine_on_device(shape, **knobs)
            what = f"{shape}: {variant}"
            ties = count_ties(run(engine, prompts, GREEDY), expected(shape), what)
            warm = count_ties(run(engine, prompts, GREEDY), expected(shape), f"{what}, warm prefix")
            stats = engine.scheduler.stats
            assert ties <= 1 and warm <= 1, f"{what}: {ties} and {warm} ties of 16 rows are no accident"
            if "num_pages" in knobs:
                assert stats.preemptions > 0, f"{what}: nobody was pushed out"
                assert (stats.swaps > 0) == (knobs["preemption"] == "swap")
            assert engine.scheduler.cache.stats.hit_tokens > 0
            print(f"{what}: equal, {ties + warm} ties, {stats.preemptions} preemptions, {stats.steps} steps")


def test_pages_of_the_default_size_change_nothing() -> None:
    prompts = ragged_prompts(256)
    for shape in SHAPES:
        model = load(folder(shape), 64, DEVICE, strict_kernels=True)
        engine = make_engine(model, device=DEVICE, **{**PAGED, "page_tokens": 64, "chunk_tokens": 50})
        for what in (f"{shape}: pages of 64", f"{shape}: pages of 64, warm prefix"):
            assert count_ties(run(engine, prompts, GREEDY), expected(shape), what) <= 1


MIXED_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=11, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=12, max_tokens=33, ignore_eos=True),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, min_p=0.05, seed=13, max_tokens=25, ignore_eos=True),
]


def streams(shape: str, **knobs: Any) -> list[list[int]]:
    prompts = ragged_prompts(256)
    params = [MIXED_PARAMS[index % len(MIXED_PARAMS)] for index in range(len(prompts))]
    return run(engine_on_device(shape, **knobs), prompts, params)


def same_streams(a: list[list[int]], b: list[list[int]], what: str) -> None:
    """Sums in another order may turn one draw in thousands: one row of sixteen at most may leave the other's path."""
    different = [row for row, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    print(f"{what}: {len(a) - len(different)} of {len(a)} streams are equal")
    assert len(different) <= 1, f"{what}: rows {different} differ"


def test_overlapped_and_synchronous_loops_give_the_same_tokens() -> None:
    for shape in SHAPES:
        one, two = (streams(shape, depth=depth, chunk_tokens=7) for depth in (1, 2))
        same_streams(one, two, f"{shape}: depth 1 and 2")


def test_graphs_and_eager_give_the_same_tokens() -> None:
    for shape in SHAPES:
        captured, eager = (streams(shape, graphs=graphs) for graphs in (True, False))
        same_streams(captured, eager, f"{shape}: graphs and eager")


def test_prepared_graphs_give_the_same_tokens() -> None:
    """All graphs captured ahead, over rows and pages that are in use afterwards; of mixed steps, too."""
    for shape in SHAPES:
        engine = engine_on_device(shape)
        mixed = engine.workers.inner._mixed
        replayed = []

        def watched(plan: Any, inner: Any = mixed.run, replayed: list[bool] = replayed, **how: Any) -> Any:
            computed = inner(plan, **how)
            replayed.append(computed is not None)
            return computed

        mixed.run = watched
        engine.prepare()
        for what in ("prepared", "prepared, warm prefix"):
            assert count_ties(run(engine, ragged_prompts(256), GREEDY), expected(shape), f"{shape}: {what}") <= 1
        print(f"{shape}: {sum(replayed)} of {len(replayed)} mixed steps were replayed")
        assert 2 * sum(replayed) >= len(replayed) > 0


# ---------------------------------------------------------------------------------------------------------------------
# Faults that only a real device has


def test_memory_that_really_runs_out_shrinks_steps() -> None:
    if not ON_GPU:
        return
    path = Path(tempfile.mkdtemp(prefix="quire-gpu-test-"))
    make_tiny("llama", path, head_dim=64, intermediate_size=8192, max_position_embeddings=8192)
    engine = make_engine(load(path, 16, DEVICE), device=DEVICE, max_len=4096, num_pages=600, page_tokens=16,
                         max_rows=8, max_batch_tokens=4096, depth=2)  # fmt: skip
    prompts = [[(7 * row + place) % 256 for place in range(1000)] for row in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    plenty = run(engine, [prompt[::-1] for prompt in prompts], params)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * 2**20) / total)
    try:
        run(engine, prompts, params)
        again = run(engine, [prompt[::-1] for prompt in prompts], params)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(f"steps went from 4096 to at most {engine.scheduler.step_cap} tokens")
    assert engine.scheduler.step_cap < 4096 and again == plenty


def test_a_capture_that_failed_leaves_random_numbers_and_its_pool_in_order() -> None:
    if not ON_GPU:
        return
    pool = CapturePool()

    def wait() -> None:  # which no capture may: it is void from then on
        torch.zeros(3, device=DEVICE).sum().item()

    stream = torch.cuda.Stream(DEVICE)
    for _ in range(2):
        with suppress(RuntimeError):
            capture_graph(stream, pool, wait)
            raise AssertionError("it did not fail")
    graph, ones = capture_graph(stream, pool, lambda: torch.ones(3, device=DEVICE))
    ones.zero_()
    graph.replay()
    assert ones.eq(1).all()
    assert torch.rand(3, device=DEVICE).lt(1).all()


def test_an_error_for_good_ends_the_engine_with_its_code() -> None:
    """In a process of its own: what follows such an error there is nothing."""
    if not ON_GPU:
        return
    done = subprocess.run([sys.executable, "-m", "tests.gpu.lost_device"], capture_output=True, text=True, timeout=120)
    print(done.stdout.strip()[-500:])
    assert done.returncode == 0 and "device_lost" in done.stdout, done.stderr[-6000:]


if __name__ == "__main__":
    run_file(globals(), *sys.argv[1:2])
