"""What a scheduler must keep to, and what it counts. Limits are resolved from the config before it is built."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.types import Plan

KEPT_STEPS = 64  # shapes of the last steps


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler must keep to; resolved from the config and the machine before it is built."""

    max_rows: int
    max_batch_tokens: int
    chunk_tokens: int
    max_waiting: int = 16384
    max_waiting_tokens: int = 64_000_000
    preemption: str = "auto"  # auto and swap: to the host while it has room; recompute: always drop
    order: str = "priority"
    step_target_seconds: float | None = None
    depth: int = 1


class StepShape(NamedTuple):
    """What one step was made of."""

    step: int
    rows: int
    prompt_rows: int
    tokens: int
    prompt_tokens: int


@dataclass(slots=True)
class SchedulerStats:
    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    recomputes: int = 0
    ended: int = 0
    rows: int = 0  # of all steps
    prompt_rows: int = 0  # of these, rows that computed tokens of a prompt
    prompt_tokens: int = 0  # of the computed tokens; the others were sampled before
    recent: deque[StepShape] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    def count(self, plan: Plan, prompt_rows: int, prompt_tokens: int) -> None:
        """A step was planned."""
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        self.steps += 1
        self.computed_tokens += num_tokens
        self.rows += num_rows
        self.prompt_rows += prompt_rows
        self.prompt_tokens += prompt_tokens
        self.recent.append(StepShape(plan.step, num_rows, prompt_rows, num_tokens, prompt_tokens))
