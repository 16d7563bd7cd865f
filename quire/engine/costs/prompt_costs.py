"""What prompt tokens cost in a step: a linear model, fitted to the steps that computed some. Part of `StepCosts`."""

from __future__ import annotations


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
