"""The step-time target on a simulated clock: a device whose steps cost what those of an 8B model cost on an H200.

The loop, the scheduler and the policy are the real ones; only time is made up. `measure` is also a small tool: run
this file to see what a target does to gaps and to times to the first token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from quire.bench.stats import percentile
from quire.cache.index import CacheIndex
from quire.engine.chunking import StepTarget
from quire.engine.costs.prompt_costs import CostModel
from quire.engine.costs.step_costs import StepCosts
from quire.engine.limits import SchedulerLimits
from quire.engine.loop import Engine
from quire.engine.scheduler import Scheduler
from quire.types import CacheSpec, Plan, PlanRow, Request, SamplingParams, StepOutput

SPEC = CacheSpec("full", "paged", (0,), (1, 8), "float32", page_tokens=16)


def h200_8b(plan: Plan) -> float:
    """Products (bytes bind below 200 tokens, arithmetic above), attention of decodes and of prompts, launches."""
    prompts = [row for row in plan.rows if row.count > 1]
    read = sum(row.start for row in plan.rows if row.count == 1) * 147e3 / 4e12
    pairs = sum(row.count * row.start + row.count**2 / 2 for row in prompts)
    return max(4.3e-3, plan.num_tokens * 19.5e-6 + 3e-4) + read + pairs * 1.18e-9 + (3e-3 if prompts else 6e-4)


def slow_cpu(plan: Plan) -> float:
    return 30e-3 + plan.num_tokens * 4e-3


@dataclass
class Simulated:
    """Workers whose steps take made-up time, one after the other."""

    cost: object
    noise: float = 0.03
    now: float = 0.0
    free_at: float = 0.0
    hiccup: dict[int, float] = field(default_factory=dict)  # step -> seconds more

    def __post_init__(self) -> None:
        self.random = random.Random(0)
        self.steps: list[tuple[int, int, float]] = []  # decodes, prompt tokens, seconds

    def forward(self, plan: Plan) -> tuple[Plan, float]:
        self.now += 0.5e-3  # the host's own time
        seconds = self.cost(plan) * self.random.uniform(1 - self.noise, 1 + self.noise) if plan.rows else 0.0
        seconds += self.hiccup.get(plan.step, 0.0)
        self.free_at = max(self.free_at, self.now) + seconds
        decodes = sum(row.count == 1 for row in plan.rows)
        self.steps.append((decodes, plan.num_tokens - decodes, seconds))
        return plan, self.free_at

    def sample(self, forward: tuple[Plan, float], masks: Mapping[int, bytes] | None = None) -> _Ticket:
        return _Ticket(self, *forward)

    def warm_ups(self) -> Iterator[None]:
        return iter(())

    def close(self) -> None: ...


@dataclass
class _Ticket:
    device: Simulated
    plan: Plan
    done_at: float

    def wait(self) -> StepOutput:
        self.device.now = max(self.device.now, self.done_at)
        return StepOutput(self.plan.step, [[1] if row.wants_sample else [] for row in self.plan.rows])


def make(target: float | None, cost: object, depth: int = 2, max_batch_tokens: int = 8192) -> tuple[Engine, Simulated]:
    device = Simulated(cost)
    limits = SchedulerLimits(256, max_batch_tokens, max_batch_tokens, step_target_seconds=target, depth=depth)
    scheduler = Scheduler(CacheIndex([SPEC], [20_000]), limits, clock=lambda: device.now)
    return Engine(scheduler, device, depth=depth), device


def request(name: str, prompt: list[int], max_tokens: int, now: float) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True).resolve()
    return Request(name, prompt, len(prompt), params, len(prompt) + max_tokens, arrival=now)


def measure(target: float | None, *, cost: object = h200_8b, depth: int = 2, num_prompts: int = 12,
            decodes: int = 64, decode_len: int = 512, prompt_len: int = 8192, every: float = 0.25,
            max_batch_tokens: int = 8192) -> tuple[list[float], list[float], Simulated]:  # fmt: skip
    """Gaps between the decodes' tokens while prompts arrive, sorted, and the prompts' times to first token."""
    engine, device = make(target, cost, depth, max_batch_tokens)
    rng = random.Random(1)
    for index in range(decodes):
        engine.add(request(f"d{index}", [rng.randrange(9999) for _ in range(decode_len)], 4000, 0.0))
    while engine.scheduler.stats.sampled_tokens < 20 * decodes:
        engine.turn()
    device.steps.clear()
    start = device.now
    due = [(start + every * index, f"p{index}") for index in range(num_prompts)]
    came = {name: at for at, name in due}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    gaps: list[float] = []
    while len(first) < num_prompts:
        while due and due[0][0] <= device.now:
            engine.add(request(due.pop(0)[1], [rng.randrange(9999) for _ in range(prompt_len)], 1, device.now))
        for delta in engine.turn():
            name = delta.request_id
            if name in came and delta.token_ids:
                first[name] = device.now - came[name]
            elif name in last:
                gaps.append(device.now - last[name])
            last[name] = device.now
    return sorted(gaps), sorted(first.values()), device


@pytest.mark.parametrize(("target", "ttft"), [(0.050, 0.45), (0.030, 0.45)])
@pytest.mark.parametrize("depth", [1, 2])
def test_gaps_keep_to_the_target_while_prompts_arrive(target: float, ttft: float, depth: int) -> None:
    gaps, first, _ = measure(target, depth=depth)
    assert percentile(gaps, 0.99) <= target * 1.05, f"p99 {percentile(gaps, 0.99) * 1e3:.1f} ms"
    assert gaps[-1] <= target * 1.25, f"max {gaps[-1] * 1e3:.1f} ms: the first prompt must not overshoot either"
    assert percentile(first, 0.5) <= ttft, f"TTFT p50 {percentile(first, 0.5) * 1e3:.0f} ms"


def test_without_a_target_prompts_go_first() -> None:
    gaps, first, _ = measure(None)
    assert gaps[-1] > 0.15 and percentile(first, 0.5) < 0.3


def test_a_slow_device_is_not_flooded_by_its_first_prompt() -> None:
    """Four milliseconds a token: the first guess must come from the decodes, and it must be too dear."""
    gaps, _, device = measure(0.2, cost=slow_cpu, depth=1, num_prompts=3, decodes=4, decode_len=32, prompt_len=400,
                              every=5.0, max_batch_tokens=512)  # fmt: skip
    assert gaps[-1] <= 0.2 * 1.25
    late = [seconds for decodes, tokens, seconds in device.steps[len(device.steps) // 2 :] if tokens > 20]
    assert late and sum(late) / len(late) > 0.2 * 0.7, "nor is it left idle once the costs are known"


def test_the_target_is_used_up() -> None:
    """Chunks settle near what fits, without swinging from step to step."""
    _, _, device = measure(0.050)
    mixed = [(tokens, seconds) for decodes, tokens, seconds in device.steps if decodes and tokens]
    settled = [seconds for tokens, seconds in mixed[10:] if tokens > 1000]
    assert len(settled) > 10 and all(0.035 < seconds < 0.0525 for seconds in settled), settled


def test_a_step_that_compiles_a_kernel_is_not_believed() -> None:
    engine, device = make(0.050, h200_8b)
    for index in range(64):
        engine.add(request(f"d{index}", [index] * 64, 2000, 0.0))
    while engine.scheduler.stats.sampled_tokens < 2000:
        engine.turn()
    for index in range(8):
        if index == 2:
            device.hiccup = {engine.scheduler.stats.steps + 3: 2.0}
        engine.add(request(f"p{index}", list(range(index, index + 8192)), 1, device.now))
        while f"p{index}" in engine.scheduler.requests:
            engine.turn()
    mixed = [tokens for decodes, tokens, _ in device.steps if decodes and tokens > 500]
    assert len(mixed) > 20 and sorted(mixed[-10:])[5] > 1500, mixed


@pytest.mark.parametrize(
    ("cost", "decodes", "target", "seconds_enough"),
    [(h200_8b, 64, 0.030, 0.2), (h200_8b, 1, 0.030, 0.4), (slow_cpu, 4, 0.200, 5.0)],
)
def test_the_first_prompt_ever_does_not_overshoot(
    cost: object, decodes: int, target: float, seconds_enough: float
) -> None:
    """Nothing but decodes was ever timed: chunks begin small and grow within a few steps to what fits."""
    costs = StepCosts()
    pacing = StepTarget(8192, target, costs)
    running = [PlanRow("d", 0, 500, 1, 0, True)] * decodes
    for step in range(5):
        costs.observe(Plan(step, list(running)), cost(Plan(step, list(running))))
    at, took = 0, []
    while at < 8192 and sum(took) < seconds_enough:
        count = pacing.budget(decodes, at) - decodes
        assert count >= StepTarget.FLOOR
        plan = Plan(9, [*running, PlanRow("p", 1, at, count, 0, False)])
        took.append(cost(plan))
        costs.observe(plan, took[-1])
        at += count
    assert max(took) <= target * 1.1, [round(seconds * 1e3, 1) for seconds in took]
    assert took[-1] > target * 0.7, "and in the end it is used up"


def test_costs_are_found_from_few_steps() -> None:
    costs = CostModel(6e-3, 1e-4)
    rng = random.Random(3)
    for _ in range(12):
        tokens, context = rng.randint(100, 2000), rng.randint(0, 8000)
        keys = tokens * context + tokens**2 // 2
        assert costs.learn(tokens, keys, (3e-3 + 2e-5 * tokens + 1.2e-9 * keys) * rng.uniform(0.98, 1.02))
    for tokens, context in ((500, 0), (1000, 4000), (2000, 8000)):
        keys = tokens * context + tokens**2 // 2
        true = 3e-3 + 2e-5 * tokens + 1.2e-9 * keys
        assert costs.seconds(tokens, keys) == pytest.approx(true, rel=0.1)
        assert costs.tokens_within(true, context) == pytest.approx(tokens, rel=0.15)


def test_lasting_change_is_believed() -> None:
    """Another process takes most of the card: after a few steps the chunks are what fits now."""
    costs = StepCosts()
    pacing = StepTarget(8192, 0.050, costs)
    costs.observe(Plan(1, [PlanRow("d", 0, 100, 1, 0, True)] * 64), 6e-3)
    for step in range(40):
        size = pacing.budget(64, 0) - 64
        slow = 1 if step < 20 else 5
        rows = [PlanRow("d", 0, 100, 1, 0, True)] * 64 + [PlanRow("p", 1, 0, size, 0, False)]
        costs.observe(Plan(step + 2, rows), slow * (4e-3 + 2.4e-5 * size))
    assert 5 * (4e-3 + 2.4e-5 * (pacing.budget(64, 0) - 64)) < 0.060


@pytest.mark.parametrize(("target", "sizes"), [(0.065, {2048}), (0.250, set(range(4096, 8193, 128)))])
def test_steps_a_little_beyond_the_captured_sizes_are_not_made(target: float, sizes: set[int]) -> None:
    """65 ms have room for 2,500 tokens: 2,048 it is; four times as much has room for many more."""
    costs = StepCosts()
    pacing = StepTarget(8192, target, costs)
    costs.observe(Plan(1, [PlanRow("d", 0, 100, 1, 0, True)] * 64), 6e-3)
    for step in range(30):
        size = pacing.budget(64, 0) - 64
        rows = [PlanRow("d", 0, 100, 1, 0, True)] * 64 + [PlanRow("p", 1, 0, size, 0, False)]
        costs.observe(Plan(step + 2, rows), 4e-3 + 2.3e-5 * size)
    assert pacing.budget(64, 0) in sizes


if __name__ == "__main__":
    for goal in (None, 0.060, 0.050, 0.040, 0.030, 0.025):
        between, first_token, run = measure(goal)
        shares = " / ".join(f"{percentile(between, share) * 1e3:.1f}" for share in (0.5, 0.99, 1.0))
        ttfts = " / ".join(f"{percentile(first_token, share) * 1e3:.0f}" for share in (0.5, 1.0))
        print(f"target {goal}: gaps p50/p99/max {shares} ms, TTFT p50/max {ttfts} ms, {len(run.steps)} steps")
