"""`quire bench scheduler`: the CPU time of scheduling, without a model and without torch.

A stub device finishes every step at once, so only the engine's Python is timed: plan, commit and the loop. Costs are
CPU time of this thread, which other processes disturb little. Two sides of a comparison alternate in one run, and
figures are medians over many rounds.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from quire.bench.progress import progress_bar
from quire.bench.stats import Bar, Report
from quire.cache.index import CacheIndex
from quire.engine.limits import SchedulerLimits
from quire.engine.loop import Engine
from quire.engine.scheduler import Scheduler
from quire.types import CacheSpec, Plan, Request, SamplingParams, StepOutput

ROW_COUNTS = (1, 16, 64, 256)
WAITING = (10, 10_000)
MATCHED = (10_000, 100_000)
BLOCKED = (100, 100_000)
PROMPT_LEN = 8192
FRESH = 64  # uncached tokens of a cached prompt
PAGE_SIZES = (16, 64)  # defaults on a CPU and on a GPU
MAX_WAITING_RATIO = 1.2
MAX_MATCH_RATIO = 12.0

PAGE_TOKENS = 16
WINDOW = PAGE_TOKENS  # steps per sample, in which each row fills one page, so every sample includes that cost
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

_cpu_ns = time.thread_time_ns


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """The number of windows or rounds of each figure, and the sizes that are compared."""

    row_windows: int = 20
    waiting_windows: int = 60
    match_rounds: int = 31
    row_counts: tuple[int, ...] = ROW_COUNTS
    waiting: tuple[int, int] = WAITING
    matched: tuple[int, int] = MATCHED
    blocked_rounds: int = 15
    blocked: tuple[int, int] = BLOCKED
    prompt_rounds: int = 20
    prompt_len: int = PROMPT_LEN


def bench_scheduler(counts: SampleCounts | None = None) -> Report:
    counts = counts or SampleCounts()
    with _without_collector(), progress_bar("scheduler", len(counts.row_counts) + 4) as advance:
        steps = []
        for count in counts.row_counts:
            steps.append(step_cost(count, counts.row_windows))
            advance(len(steps))
        waiting = waiting_growth(counts.waiting, counts.waiting_windows)
        advance(len(steps) + 1)
        matching = match_growth(counts.matched, counts.match_rounds)
        advance(len(steps) + 2)
        blocked = blocked_growth(counts.blocked, counts.blocked_rounds)
        advance(len(steps) + 3)
        prompts = prompt_costs(counts.prompt_len, counts.prompt_rounds)
    bars = [
        Bar(
            f"step with {counts.waiting[1]:,} waiting over {counts.waiting[0]:,}",
            waiting["ratio"],
            MAX_WAITING_RATIO,
            "at most",
        ),
        Bar(
            f"matching {counts.matched[1]:,} tokens over {counts.matched[0]:,}",
            matching["ratio"],
            MAX_MATCH_RATIO,
            "at most",
        ),
    ]
    return {
        "benchmark": "scheduler",
        "steps": steps,
        "prompts": prompts,
        "waiting": waiting,
        "matching": matching,
        "blocked": blocked,
        "bars": [bar.to_report() for bar in bars],
        "pass": all(bar.passed for bar in bars),
    }


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable Python's garbage collector, whose runs would add to one side of a comparison at random."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---------------------------------------------------------------------------------------------------------------------
# Stub device


class StubDevice:
    """Implements the engine's `Workers`: each row that samples gets the same token without delay."""

    def forward(self, plan: Plan) -> Plan:
        return plan

    def sample(self, forward: Plan, masks: Mapping[int, bytes] | None = None) -> StubTicket:
        return StubTicket(forward)

    def warm_ups(self) -> Iterator[None]:
        return iter(())

    def close(self) -> None:
        pass


@dataclass(slots=True)
class StubTicket:
    plan: Plan

    def wait(self) -> StepOutput:
        return StepOutput(self.plan.step, [[7] if row.wants_sample else [] for row in self.plan.rows])


class SchedulerRig:
    """A scheduler, a cache index without memory, and the requests of one side of a comparison."""

    def __init__(self, *, max_rows: int, num_pages: int, max_waiting: int = 16, page_tokens: int = PAGE_TOKENS):
        spec = CacheSpec("all", "paged", (0,), (1,), "float16", page_tokens=page_tokens)
        limits = SchedulerLimits(
            max_rows, max_batch_tokens=PROMPT_LEN, chunk_tokens=PROMPT_LEN, max_waiting=max_waiting
        )
        self.cache = CacheIndex([spec], [num_pages])
        self.scheduler = Scheduler(self.cache, limits)
        self.engine = Engine(self.scheduler, StubDevice())
        self.plan_ns = 0
        self.commit_ns = 0
        self.deferred_ns = 0  # part of commit_ns that runs after the step's deltas are sent
        self._num_added = 0

    def add(self, prompt: list[int], num_outputs: int) -> None:
        self._num_added += 1
        name = f"r{self._num_added}"
        length = len(prompt)
        self.scheduler.add(Request(name, prompt, length, GREEDY, length + num_outputs, arrival=float(self._num_added)))

    def step(self) -> int:
        """Plan, run and commit one step, and add up the costs. Returns the number of requests that ended."""
        begin = _cpu_ns()
        plan = self.scheduler.plan()
        planned = _cpu_ns()
        assert plan is not None
        output = StubTicket(plan).wait()
        ran = _cpu_ns()
        deltas = self.scheduler.commit(plan, output)
        committed = _cpu_ns()
        self.scheduler.deferred.flush()
        self.deferred_ns += _cpu_ns() - committed
        self.commit_ns += _cpu_ns() - ran
        self.plan_ns += planned - begin
        return sum(delta.finish_reason is not None for delta in deltas)

    def take_costs(self) -> tuple[float, float]:
        """Return the microseconds of plan and commit since the last call."""
        costs = self.plan_ns / 1e3, self.commit_ns / 1e3
        self.plan_ns = self.commit_ns = self.deferred_ns = 0
        return costs


def _random_prompt(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(rng.randint(low, high))]


# ---------------------------------------------------------------------------------------------------------------------
# Cost of a step


def step_cost(num_rows: int, num_windows: int) -> Report:
    """Microseconds of a step in which `num_rows` rows decode; `loop_us` is the engine's whole turn, stub included."""
    num_steps = (2 * num_windows + 2) * WINDOW
    pages_per_row = (128 + num_steps) // PAGE_TOKENS + 2
    rig = SchedulerRig(max_rows=num_rows, num_pages=num_rows * pages_per_row + 1, max_waiting=num_rows)
    rng = random.Random(num_rows)
    for _ in range(num_rows):
        rig.add(_random_prompt(rng, 64, 128), num_steps + 1)
    while len(rig.scheduler.waiting) or any(r.computed < r.prompt_len for r in rig.scheduler.running):
        rig.step()
    rig.take_costs()
    plans, commits, loops = [], [], []
    for _ in range(num_windows):
        for _ in range(WINDOW):
            rig.step()
        plan_us, commit_us = rig.take_costs()
        plans.append(plan_us / WINDOW)
        commits.append(commit_us / WINDOW)
        begin = _cpu_ns()
        _turn_steps(rig.engine, WINDOW)
        loops.append((_cpu_ns() - begin) / 1e3 / WINDOW)
    plan, commit = median(plans), median(commits)
    return {
        "rows": num_rows,
        "plan_us": plan,
        "commit_us": commit,
        "loop_us": median(loops),
        "plan_and_commit_us_per_row": (plan + commit) / num_rows,
    }


def _turn_steps(engine: Engine, num_steps: int) -> None:
    last = engine.scheduler.stats.steps + num_steps
    while engine.scheduler.stats.steps < last or engine.num_inflight:
        engine.turn()


def prompt_costs(length: int, num_rounds: int) -> list[Report]:
    """Microseconds of a prompt that one step prefills, by page size: uncached and cached except for its end, with free
    pages and with pages to evict. `books_us` is the deferred part of commit, after the token is sent."""
    rng = random.Random(length)
    sides = [(has_room, size) for has_room in (True, False) for size in PAGE_SIZES]
    rigs = [
        SchedulerRig(max_rows=1, num_pages=(2 * num_rounds if has_room else 2) * length // size + 16, page_tokens=size)
        for has_room, size in sides
    ]
    costs: dict[tuple[bool, bool, int], list[tuple[float, float, float]]] = {}
    for _ in range(num_rounds):
        prompt = _random_prompt(rng, length, length)
        again = prompt[:-FRESH] + _random_prompt(rng, FRESH, FRESH)
        for (has_room, size), rig in zip(sides, rigs, strict=True):
            for is_cached, tokens in ((False, prompt), (True, again)):
                rig.take_costs()
                rig.add(list(tokens), 2)  # a copy, since a request appends to its prompt
                rig.step()
                deferred = rig.deferred_ns / 1e3
                plan, commit = rig.take_costs()
                rig.step()  # the request ends
                costs.setdefault((is_cached, has_room, size), []).append((plan, commit - deferred, deferred))
    found = []
    for (is_cached, has_room, size), taken in costs.items():
        plan, commit, deferred = map(median, zip(*taken, strict=True))
        found.append(
            {
                "tokens": length,
                "cached": length - FRESH if is_cached else 0,
                "evicts": not has_room,
                "page_tokens": size,
                "plan_us": plan,
                "commit_us": commit,
                "books_us": deferred,
            }
        )
    return sorted(found, key=lambda cost: (cost["cached"], cost["evicts"], cost["page_tokens"]))


# ---------------------------------------------------------------------------------------------------------------------
# Growth of costs


def waiting_growth(sizes: tuple[int, int], num_windows: int, *, num_rows: int = 64) -> Report:
    """Compare a step's cost with few and with many waiting requests, while requests arrive and end on both sides."""
    sides = [_QueueSide(size, num_rows) for size in sizes]
    for side in sides:
        for _ in range(4):  # until rows hold requests of every age, and the cache is full of ended ones
            side.window()
    costs = _take_turns([side.window for side in sides], num_windows)
    return _growth(costs, {"few": sizes[0], "many": sizes[1], "rows": num_rows}, ("few_us", "many_us"))


class _QueueSide:
    """A rig with a queue of constant length: each ended request is replaced by a new one, outside the timed part."""

    def __init__(self, num_waiting: int, num_rows: int):
        self._rng = random.Random(1)  # the same requests in the same order on every side
        self._rig = SchedulerRig(max_rows=num_rows, num_pages=16 * num_rows, max_waiting=num_waiting + num_rows)
        for _ in range(num_waiting + num_rows):
            self._add()

    def window(self) -> float:
        """Run one window; returns the microseconds per step."""
        for _ in range(WINDOW):
            for _ in range(self._rig.step()):
                self._add()
        return sum(self._rig.take_costs()) / WINDOW

    def _add(self) -> None:
        self._rig.add(_random_prompt(self._rng, 32, 64), self._rng.randint(16, 48))


def match_growth(lengths: tuple[int, int], num_rounds: int) -> Report:
    """Compare the cost of matching a short and a long prompt in the prefix cache, hashing included."""
    rng = random.Random(2)
    rig = SchedulerRig(max_rows=1, num_pages=sum(lengths) // PAGE_TOKENS + 8)
    prompts = [_random_prompt(rng, length, length) for length in lengths]
    for prompt in prompts:
        rig.add(list(prompt), 1)
    while rig.engine.has_work:
        rig.engine.turn()
    costs = _take_turns([_matcher(rig.cache, prompt) for prompt in prompts], num_rounds)
    return _growth(costs, {"short": lengths[0], "long": lengths[1]}, ("short_us", "long_us"))


def _matcher(cache: CacheIndex, prompt: list[int]) -> Callable[[], float]:
    expected = (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS

    def match_once() -> float:
        request = Request("match", prompt, len(prompt), GREEDY, len(prompt) + 1)
        request.lease = cache.empty_lease(request)  # new each time, since a lease keeps its hashes
        begin = _cpu_ns()
        found = cache.match(request)
        cost = _cpu_ns() - begin
        assert found.length == expected, "the prompt is not in the cache as a whole"
        return cost / 1e3

    return match_once


def blocked_growth(lengths: tuple[int, int], num_rounds: int) -> Report:
    """Compare a step's cost while the next request has a short or a long cached prompt and no row is free. It has no
    gate; a ratio far above 1 means that a waiting request is matched again at every step."""
    costs = _take_turns([_BlockedSide(length, lengths[1], num_rounds).window for length in lengths], num_rounds)
    return _growth(costs, {"short": lengths[0], "long": lengths[1]}, ("short_us", "long_us"))


class _BlockedSide:
    """A rig with all rows busy and one waiting request whose prompt is cached."""

    NUM_ROWS = 16
    STEPS = 4  # per window; few, since such a step may be slow

    def __init__(self, length: int, longest: int, num_rounds: int):
        rng = random.Random(3)
        self._rig = rig = SchedulerRig(max_rows=self.NUM_ROWS, num_pages=longest // PAGE_TOKENS + 64 * self.NUM_ROWS)
        known = _random_prompt(rng, longest, longest)
        rig.add(list(known), 1)
        while rig.engine.has_work:
            rig.engine.turn()
        for _ in range(self.NUM_ROWS):
            rig.add(_random_prompt(rng, 64, 128), (num_rounds + 4) * self.STEPS)
        rig.step()
        rig.add(known[:length], 1)
        self.window()

    def window(self) -> float:
        for _ in range(self.STEPS):
            self._rig.step()
        return sum(self._rig.take_costs()) / self.STEPS


def _take_turns(sides: list[Callable[[], float]], num_rounds: int) -> list[list[float]]:
    """Return each side's cost in every round; the order of the sides alternates."""
    costs: list[list[float]] = [[] for _ in sides]
    for index in range(num_rounds):
        places = list(range(len(sides)))
        for place in places if index % 2 == 0 else reversed(places):
            costs[place].append(sides[place]())
    return costs


def _growth(costs: list[list[float]], sizes: Report, names: tuple[str, str]) -> Report:
    """Return the medians of both sides, and the median of the ratios of single rounds, whose two measurements are
    close in time."""
    ratio = median(large / small for small, large in zip(*costs, strict=True))
    return {**sizes, names[0]: median(costs[0]), names[1]: median(costs[1]), "ratio": ratio}
