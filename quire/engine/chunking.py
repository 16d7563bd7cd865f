"""The token budget of a step: fixed, or as large as a target time allows.

The scheduler reads the budget before each plan. `StepTarget` reads what a prompt token costs beside decodes from the
table of step costs, whose first guess is too high, so the first prefill after an idle period does not delay decodes
either.
"""

from __future__ import annotations

from typing import Protocol

from quire.engine.costs.step_costs import StepCosts
from quire.types import STEP_SIZES


class Chunking(Protocol):
    """The policy that sizes steps.

    `budget` returns how many tokens the next step may compute. The step contains `num_decodes` decodes, and the first
    prompt that it continues has `context` computed tokens.
    """

    def budget(self, num_decodes: int, context: int) -> int: ...


class TokenBudget:
    """A fixed number of tokens per step."""

    def __init__(self, max_batch_tokens: int):
        self._max = max_batch_tokens

    def budget(self, num_decodes: int, context: int) -> int:
        return self._max


class StepTarget:
    """Shrinks prefill chunks until a step with decodes meets its target time.

    Chunks grow to at most four times the largest that was timed. A step without decodes uses the whole budget.
    """

    FLOOR = 16  # minimum prompt tokens per step, so that a prefill always progresses
    AIM = 0.95  # share of the target that is aimed at, since estimates err in both directions
    GROWTH = 4
    TILE = 128  # tokens per tile of the matrix units: one token more costs a whole tile

    def __init__(self, max_batch_tokens: int, target_seconds: float, costs: StepCosts):
        self._max = max_batch_tokens
        self._aim = target_seconds * self.AIM
        self._costs = costs

    def budget(self, num_decodes: int, context: int) -> int:
        if num_decodes == 0:
            return self._max
        room = self._costs.prompt_tokens_within(self._aim, context)
        room = min(room, self.GROWTH * max(self._costs.largest_prompt, self.FLOOR))
        total = num_decodes + max(self.FLOOR, room)
        if total >= 2 * STEP_SIZES[-1]:  # sizes slightly beyond the captured ones waste most of a tile
            total -= total % self.TILE
        else:
            total = max((size for size in STEP_SIZES if size <= total), default=total)
        return min(self._max, max(total, num_decodes + self.FLOOR))


def choose_chunking(max_batch_tokens: int, step_target_seconds: float | None, costs: StepCosts) -> Chunking:
    if step_target_seconds is None:
        return TokenBudget(max_batch_tokens)
    return StepTarget(max_batch_tokens, step_target_seconds, costs)
