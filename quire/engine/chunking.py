"""How many tokens a step may compute: a fixed number, or as many as keep it within a target time.

The scheduler asks before each plan and tells how long each step took. `StepTarget` learns what a prompt token costs
beside running decodes, from a guess that is too dear rather than too cheap, so that the first prompt after a quiet time
does not disturb anyone either.
"""

from __future__ import annotations

from typing import Protocol

from quire.types import STEP_SIZES, Plan


class Chunking(Protocol):
    """How many tokens the next step may compute. `num_decodes` rows decode in it; the first prompt that goes on has
    `context` tokens behind it."""

    def budget(self, num_decodes: int, context: int) -> int: ...
    def observe(self, plan: Plan, seconds: float) -> None: ...


class TokenBudget:
    """A fixed number of tokens a step."""

    def __init__(self, max_batch_tokens: int):
        self._max = max_batch_tokens

    def budget(self, num_decodes: int, context: int) -> int:
        return self._max

    def observe(self, plan: Plan, seconds: float) -> None:
        pass


class StepTarget:
    """Prompt chunks shrink until a step with decodes in it meets its target time.

    A step takes base + prompt tokens * a + (prompt token, key) pairs * b; see `CostModel`. Steps of decodes alone say
    what the guess starts from: a prompt token costs no more than a decode's share of them. Chunks grow at most
    fourfold beyond what was ever timed. While nothing decodes there is nobody to disturb: the whole budget is used.
    """

    FLOOR = 16  # never starve a prompt altogether
    AIM = 0.95  # of the target: estimates err to both sides
    GROWTH = 4
    TILE = 128  # matrix units compute this many tokens at once: a few beyond cost as much as all

    def __init__(self, max_batch_tokens: int, target_seconds: float):
        self._max = max_batch_tokens
        self._aim = target_seconds * self.AIM
        self._decode_seconds: float | None = None  # of a step without prompts, a running mean
        self._decode_rows = 1
        self._largest = 0  # prompt tokens in one step, of all that were timed
        self._costs: CostModel | None = None

    def budget(self, num_decodes: int, context: int) -> int:
        if num_decodes == 0:
            return self._max
        room = min(self._room(context), self.GROWTH * max(self._largest, self.FLOOR))
        total = num_decodes + max(self.FLOOR, room)
        if total >= 2 * STEP_SIZES[-1]:  # a little beyond the captured sizes costs more than it is worth
            total -= total % self.TILE
        else:
            total = max((size for size in STEP_SIZES if size <= total), default=total)
        return min(self._max, max(total, num_decodes + self.FLOOR))

    def observe(self, plan: Plan, seconds: float) -> None:
        tokens = keys = num_decodes = 0
        for row in plan.rows:
            if row.count > 1 or not row.wants_sample:
                tokens += row.count
                keys += row.count * row.start + row.count * row.count // 2
            else:
                num_decodes += 1
        if not tokens:
            if num_decodes:
                old = self._decode_seconds
                self._decode_seconds = seconds if old is None else min(0.9 * old + 0.1 * seconds, 2 * old)
                self._decode_rows = num_decodes
            return
        if self._costs is None:
            self._costs = self._first_guess(seconds, tokens)
        if self._costs.learn(tokens, keys, seconds):
            self._largest = max(self._largest, tokens)

    def _room(self, context: int) -> int:
        """Prompt tokens that fit beside the decodes."""
        costs = self._costs
        if costs is None:
            if self._decode_seconds is None:
                return self.FLOOR
            costs = self._first_guess(self._decode_seconds, self._decode_rows)
        return costs.tokens_within(self._aim, context)

    def _first_guess(self, seconds: float, tokens: int) -> CostModel:
        if self._decode_seconds is None:  # nothing but a prompt was timed so far: blame every token alike
            return CostModel(0.0, seconds / tokens)
        return CostModel(self._decode_seconds, self._decode_seconds / self._decode_rows)


class CostModel:
    """seconds = base + a * tokens + b * keys, fitted as steps are timed (a Kalman filter over the three).

    What a fit of few points leaves open stays near the guess. A step that took several times what was expected
    compiled a kernel or waited for the disk; only when that happens again and again it is believed.
    """

    NOISE = 0.05  # of a step's time
    DRIFT = 0.05  # what the costs may have changed by from step to step
    KEYS = 0.08  # the guess of b, as a share of a in those units: what attention usually costs
    OUTLIER = 3.0
    PATIENCE = 3  # outliers in a row that are believed in the end
    UNITS = (1.0, 1e-3, 1e-6)  # keeps the three about equally large

    def __init__(self, base: float, per_token: float):
        slope = per_token / self.UNITS[1]
        self._cost = [base, slope, self.KEYS * slope]
        self._guess = [max(base, 1e-6), max(slope, 1e-9), max(self.KEYS * slope, 1e-12)]
        self._cov = [[0.0] * 3 for _ in range(3)]
        self._doubt()
        self._num_outliers = 0

    def _doubt(self) -> None:
        """As unsure as at the beginning: any of the three may be as large again, or nothing."""
        for i, scale in enumerate(self._guess):
            self._cov[i] = [0.0] * 3
            self._cov[i][i] = scale * scale

    def seconds(self, tokens: int, keys: int) -> float:
        return sum(c * x for c, x in zip(self._positive(), self._features(tokens, keys), strict=True))

    def tokens_within(self, seconds: float, context: int) -> int:
        """The most tokens that take no longer, as one chunk of a prompt that has `context` tokens behind it."""
        base, a, b = (c * unit for c, unit in zip(self._positive(), self.UNITS, strict=True))
        left = seconds - base
        if left <= 0:
            return 0
        slope = a + b * context  # left = slope * n + b / 2 * n²
        return int(2 * left / (slope + (slope * slope + 2 * b * left) ** 0.5))

    def learn(self, tokens: int, keys: int, seconds: float) -> bool:
        """False: it was taken for an accident."""
        features = self._features(tokens, keys)
        expected = sum(c * x for c, x in zip(self._cost, features, strict=True))
        if seconds > self.OUTLIER * max(expected, self.seconds(tokens, keys)):
            self._num_outliers += 1
            if self._num_outliers < self.PATIENCE:
                return False
            self._guess = [
                max(g, c) * seconds / max(expected, 1e-9) for g, c in zip(self._guess, self._cost, strict=True)
            ]
            self._doubt()
        self._num_outliers = 0
        for i in range(3):
            self._cov[i][i] += (self.DRIFT * self._cost[i]) ** 2
        spread = [sum(self._cov[i][j] * features[j] for j in range(3)) for i in range(3)]
        total = sum(x * s for x, s in zip(features, spread, strict=True)) + (self.NOISE * seconds) ** 2
        gain = [s / total for s in spread]
        for i in range(3):
            self._cost[i] += gain[i] * (seconds - expected)
            for j in range(3):
                self._cov[i][j] -= gain[i] * spread[j]
        return True

    def _features(self, tokens: int, keys: int) -> tuple[float, float, float]:
        return 1.0, tokens * self.UNITS[1], keys * self.UNITS[2]

    def _positive(self) -> list[float]:
        """Costs are never nothing, whatever noise says."""
        return [max(c, share * g) for c, g, share in zip(self._cost, self._guess, (0.0, 0.001, 0.0), strict=True)]


def choose_chunking(max_batch_tokens: int, step_target_seconds: float | None) -> Chunking:
    if step_target_seconds is None:
        return TokenBudget(max_batch_tokens)
    return StepTarget(max_batch_tokens, step_target_seconds)
