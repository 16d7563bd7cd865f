"""Measured durations of decode steps, by number of tokens and length of context.

The drafter `speculation.goodput` compares steps with and without drafts by them. The duration of a size that was never
timed is estimated from the nearest timed sizes, first by a curve that is too steep for most machines.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MAX_TOKENS = 512  # larger steps are not recorded
KEYS_PER_BAND = 1024  # keys per token in the first band of contexts; each next band is twice as wide
SLOWER, FASTER = 0.1, 0.3  # weights of a new time; disturbances make a step slower, never faster
SLOW = 4.0  # a step this many times slower than expected has waited for something else
MAX_SURPRISE = 1.5  # maximum ratio of a size's first time to its estimate
PATIENCE = 3  # number of consecutive slow steps after which they count
PER_TOKEN = 0.12  # first guess of the cost of one more token, relative to a step of one token


class StepCosts:
    """Seconds of a step of decodes and drafts."""

    def __init__(self) -> None:
        self._times: dict[int, dict[int, float]] = {}  # band -> tokens -> seconds
        self._sizes: dict[int, list[int]] = {}  # band -> the timed sizes, ascending
        self._counts: dict[tuple[int, int], int] = {}  # (band, tokens) -> steps timed
        self._num_slow = 0

    def observe(self, num_tokens: int, num_keys: int, seconds: float) -> None:
        """Learn from a step of `num_tokens` decodes and drafts that read `num_keys` keys in all."""
        if not 0 < num_tokens <= MAX_TOKENS or seconds <= 0:
            return
        band = _band(num_tokens, num_keys)
        times = self._times.get(band, {})
        old = times.get(num_tokens)
        if old is None:
            expected = self.seconds(num_tokens, num_keys)
            times[num_tokens] = seconds if expected is None else min(seconds, MAX_SURPRISE * expected)
            self._times[band] = times
            insort(self._sizes.setdefault(band, []), num_tokens)
            return
        if seconds > SLOW * old:
            self._num_slow += 1
            if self._num_slow < PATIENCE:
                return
        else:
            self._num_slow = 0
        count = self._counts[band, num_tokens] = self._counts.get((band, num_tokens), 1) + 1
        weight = max(FASTER if seconds < old else SLOWER, 1 / count)
        times[num_tokens] = old + weight * (min(seconds, 2 * old) - old)

    def seconds(self, num_tokens: int, num_keys: int) -> float | None:
        """Return the expected time of such a step; None before any was timed."""
        if not self._times:
            return None
        band = _band(num_tokens, num_keys)
        if band not in self._times:
            band = min(self._times, key=lambda known: (abs(known - band), known))
        return self._interpolate(self._sizes[band], self._times[band], num_tokens)

    def _interpolate(self, sizes: list[int], times: dict[int, float], num_tokens: int) -> float:
        known = times.get(num_tokens)
        if known is not None:
            return known
        place = bisect_left(sizes, num_tokens)
        if 0 < place < len(sizes):
            low, high = sizes[place - 1], sizes[place]
            share = (num_tokens - low) / (high - low)
            return times[low] + share * (times[high] - times[low])
        nearest = sizes[0] if place == 0 else sizes[-1]
        guess = times[nearest] * (1 + PER_TOKEN * (num_tokens - 1)) / (1 + PER_TOKEN * (nearest - 1))
        if place > 1:  # at least the slope between the two largest timed sizes
            slope = (times[nearest] - times[sizes[-2]]) / (nearest - sizes[-2])
            guess = max(guess, times[nearest] + slope * (num_tokens - nearest))
        return guess


def _band(num_tokens: int, num_keys: int) -> int:
    """Return the band of the mean context."""
    return (num_keys // max(num_tokens, 1) // KEYS_PER_BAND).bit_length()
