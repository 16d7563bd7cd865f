"""How often the loop makes the host wait: once a step, for the tokens of the step before, and for nothing else.

CUDA itself is asked: torch's sync debug mode reports every operation that waits for the device, with the line that
called it, and events and streams are watched for waits of our own. Every case runs once before, so that what compiles
or is captured at first sight has been.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quire.types import SamplingParams
from tests.cpu.families.harness import all_families, save_checkpoint
from tests.cpu.rig import load, make_engine, make_request
from tests.cpu.tiny_models import make_tiny
from tests.gpu.script import DEVICE, ON_GPU, marks, run_file

pytestmark = marks()

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6, "seed": 3},
    "top-k, top-p, min-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 3},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "seed": 3},
    "logprobs": {"temperature": 0.7, "logprobs": 3, "seed": 3},
}
SWAPS = {"num_pages": 26, "preemption": "swap", "host_memory": 1 << 26, "prefix_cache": False}
# Mixed steps of the last six are launched kernel by kernel.
KINDS = (
    "gemma3",
    "gemma4 experts",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "kimi_linear",
    "nemotron_h experts",
    "mamba2",
    "lfm2",
)


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """Counts waits: "event" are those of a step's ticket for its tokens, all others are named by their source line."""
    waits: Counter[str] = Counter()
    wait_for_event, wait_for_stream = torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize

    def event(self: Any) -> None:
        caller = sys._getframe(1)
        file = Path(caller.f_code.co_filename).name
        waits["event" if file == "runner.py" else f"{file}:{caller.f_lineno}"] += 1
        wait_for_event(self)

    def stream(self: Any) -> None:
        waits["a stream's synchronize"] += 1
        wait_for_stream(self)

    torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize = event, stream  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.Event.synchronize = wait_for_event  # type: ignore[method-assign]
        torch.cuda.Stream.synchronize = wait_for_stream  # type: ignore[method-assign]
    for warning in said:
        if "synchroniz" in str(warning.message):
            waits[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


def work(engine: Any, params: SamplingParams, salt: int) -> tuple[int, int]:
    """Eight requests decode, then prompts join them chunk by chunk; (steps so far, turns with a chunk in flight)."""
    for index in range(8):
        prompt = [(salt + 31 * index + place) % 250 for place in range(20 + index)]
        engine.add(make_request(f"d{salt}-{index}", prompt, params))
    mixed = turns = 0
    while engine.has_work:
        turns += 1
        if turns in (15, 25):
            prompt = [(salt + turns + 7 * place) % 250 for place in range(90)]
            engine.add(make_request(f"p{salt}-{turns}", prompt, params))
        engine.turn()
        plans = [plan for plan, _, _ in engine._inflight]
        mixed += any(row.count > 1 for plan in plans[-1:] for row in plan.rows) and turns > 10
    return engine.scheduler.stats.steps, mixed


def test_the_host_waits_once_a_step_and_for_nothing_but_tokens() -> None:
    if not ON_GPU:
        return
    folder = Path(tempfile.mkdtemp(prefix="quire-gpu-test-"))
    make_tiny("qwen3", folder, head_dim=64)
    model = load(folder, 16, DEVICE, dtype="bfloat16")
    trouble = {case: other_waits(model, case, **fields) for case, fields in CASES.items()}
    assert not any(trouble.values()), f"the host waited elsewhere: {trouble}"


def test_so_it_does_for_models_of_other_kinds() -> None:
    if not ON_GPU:
        return
    families = {family.name: family for family in all_families()}
    trouble = {}
    for kind in KINDS:
        folder = Path(tempfile.mkdtemp(prefix="quire-gpu-test-"))
        save_checkpoint(families[kind], folder)
        trouble[kind] = other_waits(load(folder, 16, DEVICE, dtype="bfloat16"), kind, temperature=0.0)
    assert not any(trouble.values()), f"the host waited elsewhere: {trouble}"


def test_nor_does_it_wait_for_units_that_are_swapped_out_and_in() -> None:
    """What leaves is there long before its owner comes back."""
    if not ON_GPU:
        return
    folder = Path(tempfile.mkdtemp(prefix="quire-gpu-test-"))
    make_tiny("qwen3", folder, head_dim=64)
    trouble = other_waits(load(folder, 16, DEVICE, dtype="bfloat16"), "swaps", SWAPS, temperature=0.0)
    assert not trouble, f"the host waited elsewhere: {trouble}"


def other_waits(model: Any, what: str, knobs: dict[str, Any] | None = None, **fields: Any) -> dict[str, int]:
    """Those that are not for the tokens of the step before, or are more than one of these a step."""
    params = SamplingParams(**fields, max_tokens=40, ignore_eos=True)
    knobs = {"page_tokens": 16, "depth": 2, "chunk_tokens": 32, "max_batch_tokens": 64, **(knobs or {})}
    engine = make_engine(model, device=DEVICE, **knobs)
    engine.prepare()
    work(engine, params, salt=0)
    stats, units = engine.scheduler.stats, engine.scheduler.cache.stats
    before, out_before, in_before = stats.steps, units.swapped_out, units.swapped_in
    with watched() as waits:
        steps, mixed = work(engine, params, salt=100)
    steps -= before
    moved = units.swapped_out - out_before, units.swapped_in - in_before
    events = waits.pop("event", 0)
    print(f"{what}: {steps} steps, {mixed} of them mixed; {moved[0]} units out, {moved[1]} in; "
          f"{events} waits for tokens, others: {dict(waits) or 'none'}")  # fmt: skip
    assert mixed >= 4, "prompts joined running decodes"
    assert all(moved) or knobs.get("preemption") != "swap", "requests were swapped out and in"
    return dict(waits) if events <= steps else dict(waits, events=events, steps=steps)


def test_the_watch_sees_a_wait() -> None:
    """The oracle itself: a value read from the device is found, with its line."""
    if not ON_GPU:
        return
    with watched() as waits:
        torch.ones(3, device=DEVICE).sum().item()
    assert sum(waits.values()) == 1 and "test_syncs.py" in next(iter(waits)), waits


if __name__ == "__main__":
    run_file(globals(), *sys.argv[1:2])
