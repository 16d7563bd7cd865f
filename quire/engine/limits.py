"""Limits and counters of the scheduler."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from quire.types import Plan
from quire.types.bounds import MAX_DRAFTS, Count

KEPT_STEPS = 64  # number of recent steps whose shapes are kept


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the scheduler, resolved from the config and the machine before it is built."""

    max_rows: int
    max_batch_tokens: int
    chunk_tokens: int
    max_waiting: int = 16384
    max_waiting_tokens: int = 64_000_000
    preemption: str = "auto"  # auto and swap: swap out while the host has room; recompute: always drop the state
    order: str = "priority"
    prefix_wait: float | None = None  # seconds a request waits for others whose prefix is cached; None: it never does
    step_target_seconds: float | None = None
    depth: int = 1
    stages: int = 1  # of the pipeline, among which running requests are spread


NUM_SIZES = 15  # classes of batch sizes: up to 1, 2, 4, ... 8192 rows, and more


class StepShape(NamedTuple):
    """Numbers of rows and tokens in one step."""

    step: int
    rows: int
    prompt_rows: int
    tokens: int
    prompt_tokens: int


DraftCounts = Annotated[list[Count], Meta(max_length=MAX_DRAFTS)]  # by position in the draft


class ProposerCounts(msgspec.Struct, array_like=True):
    """What became of one proposer's guesses, by their position in a draft."""

    name: Annotated[str, Meta(max_length=256)]
    drafted: DraftCounts = []  # guesses made, verified or not
    right: DraftCounts = []  # drafted tokens that equal the output, verified or not
    verified: DraftCounts = []  # guesses that a step computed
    accepted: DraftCounts = []  # verified tokens that became output
    failed: Count = 0  # errors, each of which switched the proposer off for one request

    def add_drafted(self, length: int) -> None:
        _add(self.drafted, length)

    def add_right(self, length: int) -> None:
        _add(self.right, length)

    def add_verified(self, num_drafts: int, num_accepted: int) -> None:
        _add(self.verified, num_drafts)
        _add(self.accepted, num_accepted)


class SpeculationStats(msgspec.Struct, array_like=True):
    """Counters of speculation since the start of the engine."""

    proposers: Annotated[list[ProposerCounts], Meta(max_length=64)] = []
    speedup: float = 1.0  # expected time without drafts over the time with them, for the same tokens
    audits: Count = 0  # steps that took the opposite choice, to measure it
    audit_share: float = 0.0  # expected share of the time that audits have cost

    def by_name(self, name: str) -> ProposerCounts:
        """Return the counts of a proposer. Raises KeyError if there is none of this name."""
        for counts in self.proposers:
            if counts.name == name:
                return counts
        raise KeyError(name)


def _add(counts: list[int], length: int) -> None:
    """Count one guess at each of the first `length` positions."""
    if length > len(counts):
        counts.extend([0] * (min(length, MAX_DRAFTS) - len(counts)))
    for place in range(min(length, MAX_DRAFTS)):
        counts[place] += 1


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start of the engine."""

    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    recomputes: int = 0
    ended: int = 0
    rows: int = 0  # summed over all steps
    prompt_rows: int = 0  # rows that computed prompt tokens
    prompt_tokens: int = 0  # computed tokens of prompts; the other computed tokens were sampled
    batch_sizes: list[int] = field(default_factory=lambda: [0] * NUM_SIZES)  # steps by rows: up to 1, 2, 4, 8, ...
    recent: deque[StepShape] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    stage_busy: list[float] = field(default_factory=list)  # seconds that each pipeline stage computed
    stage_seconds: float = 0.0  # time in which those steps were in flight

    def count_stages(self, busy: list[float], seconds: float) -> None:
        """Count how long each pipeline stage computed a step that took `seconds` of the pipeline's time."""
        if busy:
            self.stage_busy = [a + b for a, b in zip(self.stage_busy or [0.0] * len(busy), busy, strict=True)]
            self.stage_seconds += seconds

    def idle_shares(self) -> list[float]:
        """Return for each pipeline stage the share of the time that it waited for others; empty without stages."""
        if not self.stage_seconds:
            return []
        return [max(0.0, 1 - busy / self.stage_seconds) for busy in self.stage_busy]

    def count(self, plan: Plan, prompt_rows: int, prompt_tokens: int) -> None:
        """Count a planned step."""
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        self.steps += 1
        self.computed_tokens += num_tokens
        self.rows += num_rows
        self.prompt_rows += prompt_rows
        self.prompt_tokens += prompt_tokens
        self.batch_sizes[min(NUM_SIZES - 1, max(0, num_rows - 1).bit_length())] += 1
        self.recent.append(StepShape(plan.step, num_rows, prompt_rows, num_tokens, prompt_tokens))
