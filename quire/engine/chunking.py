"""The token budget of a step: fixed, or as large as a target time allows.

The scheduler reads the budget before each plan and reports the duration of each step. `StepTarget` learns what a prompt
token costs beside decodes. It starts from a guess that is too high, so the first prefill after an idle period does not
delay decodes either.
"""

from __future__ import annotations

from typing import Protocol

from quire.types import STEP_SIZES, Plan


class Chunking(Protocol):
    """The policy that sizes steps.

    `budget` returns how many tokens the next step may compute. The step contains `num_decodes` decodes, and the first
    prompt that it continues has `context` computed tokens.
    """

    def budget(self, num_decodes: int, context: int) -> int: ...
    def observe(self, plan: Plan, seconds: float) -> None: ...


class TokenBudget:
    """A fixed number of tokens per step."""

    def __init__(self, max_batch_tokens: int):
        self._max = max_batch_tokens

    def budget(self, num_decodes: int, context: int) -> int:
        return self._max

    def observe(self, plan: Plan, seconds: float) -> None:
        pass


class StepTarget:
    """Shrinks prefill chunks until a step with decodes meets its target time.

    A step takes base + prompt tokens * a + (prompt token, key) pairs * b; see `CostModel`. The first guess comes from
    steps of decodes alone: a prompt token costs at most as much as one decode in them. Chunks grow to at most four
    times the largest that was timed. A step without decodes uses the whole budget.
    """

    FLOOR = 16  # minimum prompt tokens per step, so that a prefill always progresses
    AIM = 0.95  # share of the target that is aimed at, since estimates err in both directions
    GROWTH = 4
    TILE = 128  # tokens per tile of the matrix units: one token more costs a whole tile

    def __init__(self, max_batch_tokens: int, target_seconds: float):
        self._max = max_batch_tokens
        self._aim = target_seconds * self.AIM
        self._decode_seconds: float | None = None  # running mean of steps without prefill
        self._decode_rows = 1
        self._largest = 0  # most prompt tokens in one timed step
        self._costs: CostModel | None = None

    def budget(self, num_decodes: int, context: int) -> int:
        if num_decodes == 0:
            return self._max
        room = min(self._room(context), self.GROWTH * max(self._largest, self.FLOOR))
        total = num_decodes + max(self.FLOOR, room)
        if total >= 2 * STEP_SIZES[-1]:  # sizes slightly beyond the captured ones waste most of a tile
            total -= total % self.TILE
        else:
            total = max((size for size in STEP_SIZES if size <= total), default=total)
        return min(self._max, max(total, num_decodes + self.FLOOR))

    def observe(self, plan: Plan, seconds: float) -> None:
        tokens = keys = num_decodes = 0
        for row in plan.rows:
            if row.count > 1 + row.num_drafts or not row.wants_sample:
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
        if self._decode_seconds is None:  # only prefill was timed so far: every token counts alike
            return CostModel(0.0, seconds / tokens)
        return CostModel(self._decode_seconds, self._decode_seconds / self._decode_rows)


class CostModel:
    """seconds = base + a * tokens + b * keys, fitted to timed steps by a Kalman filter over the three coefficients.

    Coefficients that few points do not determine stay near the guess. A step that took several times longer than
    expected has compiled a kernel or waited for the disk; such outliers count only when several come in a row.
    """

    NOISE = 0.05  # standard deviation of a step, relative to its time
    DRIFT = 0.05  # relative change of the coefficients from step to step
    KEYS = 0.08  # first guess of b relative to a, in UNITS: the usual cost of attention
    OUTLIER = 3.0
    PATIENCE = 3  # number of consecutive outliers after which the model follows them
    UNITS = (1.0, 1e-3, 1e-6)  # scales the three coefficients to similar size

    def __init__(self, base: float, per_token: float):
        slope = per_token / self.UNITS[1]
        self._cost = [base, slope, self.KEYS * slope]
        self._guess = [max(base, 1e-6), max(slope, 1e-9), max(self.KEYS * slope, 1e-12)]
        self._cov = [[0.0] * 3 for _ in range(3)]
        self._doubt()
        self._num_outliers = 0

    def _doubt(self) -> None:
        """Reset the covariance to that of the first guess, with a deviation as large as each coefficient."""
        for i, scale in enumerate(self._guess):
            self._cov[i] = [0.0] * 3
            self._cov[i][i] = scale * scale

    def seconds(self, tokens: int, keys: int) -> float:
        return sum(c * x for c, x in zip(self._positive(), self._features(tokens, keys), strict=True))

    def tokens_within(self, seconds: float, context: int) -> int:
        """Return the largest chunk of a prompt with `context` computed tokens that takes at most `seconds`."""
        base, a, b = (c * unit for c, unit in zip(self._positive(), self.UNITS, strict=True))
        left = seconds - base
        if left <= 0:
            return 0
        slope = a + b * context  # left = slope * n + b / 2 * n²
        return int(2 * left / (slope + (slope * slope + 2 * b * left) ** 0.5))

    def learn(self, tokens: int, keys: int, seconds: float) -> bool:
        """Fit the model to a timed step. False if the step was ignored as an outlier."""
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
        """Return the coefficients, bounded below against noise."""
        return [max(c, share * g) for c, g, share in zip(self._cost, self._guess, (0.0, 0.001, 0.0), strict=True)]


def choose_chunking(max_batch_tokens: int, step_target_seconds: float | None) -> Chunking:
    if step_target_seconds is None:
        return TokenBudget(max_batch_tokens)
    return StepTarget(max_batch_tokens, step_target_seconds)
