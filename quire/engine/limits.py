"""Limits and counters of the scheduler."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.types import Plan

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
    step_target_seconds: float | None = None
    depth: int = 1


class StepShape(NamedTuple):
    """Numbers of rows and tokens in one step."""

    step: int
    rows: int
    prompt_rows: int
    tokens: int
    prompt_tokens: int


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
    prompt_rows: int = 0  # of `rows`, those that computed prompt tokens
    prompt_tokens: int = 0  # of `computed_tokens`, those of prompts; the others were sampled
    recent: deque[StepShape] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    def count(self, plan: Plan, prompt_rows: int, prompt_tokens: int) -> None:
        """Count a planned step."""
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        self.steps += 1
        self.computed_tokens += num_tokens
        self.rows += num_rows
        self.prompt_rows += prompt_rows
        self.prompt_tokens += prompt_tokens
        self.recent.append(StepShape(plan.step, num_rows, prompt_rows, num_tokens, prompt_tokens))
