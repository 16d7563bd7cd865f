"""How long steps take, learned from every real step: one table, which pacing and draft control read.

Steps of decodes and drafts are timed by their number of tokens and the length of their context. Sizes that were never
timed are estimated from the nearest that were, by a curve that is too steep for most machines until it is corrected.
Steps with prompt tokens feed a linear model of what those cost. The scheduler reports each step once.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from quire.engine.costs.prompt_costs import CostModel
from quire.types import Plan

MAX_TOKENS = 512  # steps with more tokens are not timed by their size
KEYS_PER_BAND = 1024  # keys per token in the first band of contexts; each next band is twice as wide
SLOWER, FASTER = 0.1, 0.2  # weight of a slower and of a faster step in the pace; disturbances only slow steps down
SETTLED = 4  # number of timed steps of one size before steps of that size change the pace
MIN_WEIGHT = 0.03  # minimum weight of a new time in the mean of its size
SLOW = 4.0  # a step this many times slower than expected is attributed to other load on the machine
MAX_SURPRISE = 2.5  # bound on the first time of a size, as a multiple of the expected time
PATIENCE = 3  # number of consecutive slow steps from which on they count
PER_TOKEN = 0.12  # first guess: what one more token costs, relative to a step of one
REFIT = 8  # number of new times after which the curve is fitted again; at once for a size with few times
MAX_WEIGHT = 20  # maximum weight of one size in the fit, in steps


@dataclass(frozen=True, slots=True)
class StepSize:
    """The sizes in a plan that determine how long its step takes."""

    decodes: int  # rows that compute one token, besides drafts and replayed tokens
    num_tokens: int  # tokens of the decode rows, drafts and replayed tokens included
    num_keys: int  # number of keys that these tokens attend to
    num_drafts: int
    num_replayed: int
    prompt_tokens: int
    prompt_pairs: int  # number of pairs of a prompt token and a key that it attends to

    @classmethod
    def of(cls, plan: Plan) -> StepSize:
        rows = plan.rows
        starts = [row.start for row in rows if row.count == 1 and row.wants_sample]
        if len(starts) == len(rows):  # the usual step: decodes alone, with at most hundreds of rows
            return cls(len(rows), len(rows), sum(starts), 0, 0, 0, 0)
        decodes = tokens = keys = drafts = replayed = prompt_tokens = pairs = 0
        for row in rows:
            if row.wants_sample and row.count == 1 + row.num_drafts + row.num_replayed:
                decodes += 1
                tokens += row.count
                drafts += row.num_drafts
                replayed += row.num_replayed
                keys += row.count * row.start
            else:
                prompt_tokens += row.count
                pairs += row.count * row.start + row.count * row.count // 2
        return cls(decodes, tokens, keys, drafts, replayed, prompt_tokens, pairs)


class StepCosts:
    """Seconds of steps, by what they compute."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band] = {}
        self._pace = 1.0  # current seconds over the bands' times: what slows a machine slows steps of every size
        self._num_slow = 0  # very slow steps in a row
        self._prompts: CostModel | None = None
        self._last_decodes: tuple[StepSize, float] | None = None  # the last step of decodes, and its seconds
        self.largest_prompt = 0  # most prompt tokens in one timed step

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from a step."""
        size = StepSize.of(plan)
        if seconds <= 0:
            return
        if size.prompt_tokens:
            self._observe_prompts(size, seconds)
        elif size.decodes:
            self.observe_decodes(size.num_tokens, size.num_keys, seconds)
            self._last_decodes = (size, seconds)

    # -- decodes and drafts ---------------------------------------------------------------------------------------

    def observe_decodes(self, num_tokens: int, num_keys: int, seconds: float) -> None:
        """Learn from a step of `num_tokens` decodes and drafts that read `num_keys` keys in all."""
        if not 0 < num_tokens <= MAX_TOKENS or seconds <= 0:
            return
        expected = self.seconds(num_tokens, num_keys)
        band = self._bands.setdefault(_band_of(num_tokens, num_keys), _Band())
        if expected is not None and num_tokens in band.times:
            if seconds > SLOW * expected:
                self._num_slow += 1
                if self._num_slow < PATIENCE:
                    return
            else:
                self._num_slow = 0
            if band.counts[num_tokens] >= SETTLED:
                change = min(seconds / expected, 2.0)
                self._pace *= change ** (FASTER if change < 1 else SLOWER)
            seconds = min(seconds, 2 * expected)
        elif expected is not None:
            seconds = min(seconds, MAX_SURPRISE * expected)
        band.add(num_tokens, seconds / self._pace)

    def seconds(self, num_tokens: int, num_keys: int) -> float | None:
        """Return the expected time of such a step; None before any was timed."""
        if not self._bands:
            return None
        wanted = _band_of(num_tokens, num_keys)
        band = self._bands.get(wanted)
        if band is None:
            band = self._bands[min(self._bands, key=lambda known: (abs(known - wanted), known))]
        return self._pace * band.seconds(num_tokens)

    # -- prompts --------------------------------------------------------------------------------------------------

    def prompt_tokens_within(self, seconds: float, context: int) -> int:
        """Return how many tokens of a prompt with `context` computed ones fit beside decodes in a step of so many
        seconds; 0 before any step was timed."""
        costs = self._prompts
        if costs is None:
            costs = self._first_guess()
            if costs is None:
                return 0
        return costs.tokens_within(seconds, context)

    def prompt_seconds(self, num_tokens: int, context: int) -> float | None:
        """Return how long it takes to compute so many tokens of a prompt with `context` computed ones; None before any
        step with prompt tokens was timed."""
        if self._prompts is None or not self.largest_prompt:
            return None
        seconds, size = 0.0, self.largest_prompt
        for first in range(0, num_tokens, size):
            count = min(size, num_tokens - first)
            seconds += self._prompts.seconds(count, count * (context + first) + count * count // 2)
        return seconds

    def _first_guess(self) -> CostModel | None:
        """Return a model by which a prompt token costs what a row of decodes costs; None before any step of decodes."""
        if self._last_decodes is None:
            return None
        size, seconds = self._last_decodes
        base = self.seconds(size.num_tokens, size.num_keys) or seconds
        return CostModel(base, base / size.decodes)

    def _observe_prompts(self, size: StepSize, seconds: float) -> None:
        if self._prompts is None:  # too dear at first: a prompt token costs at most as much as a decode
            self._prompts = self._first_guess() or CostModel(0.0, seconds / size.prompt_tokens)
        if self._prompts.learn(size.prompt_tokens, size.prompt_pairs, seconds):
            self.largest_prompt = max(self.largest_prompt, size.prompt_tokens)


@dataclass(slots=True)
class _Band:
    """The times of steps whose contexts are of similar length, by number of tokens, at a pace of 1."""

    times: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)  # steps timed
    sizes: list[int] = field(default_factory=list)  # ascending, as of the last fit
    fit: list[float] = field(default_factory=list)  # fitted time of each size, never falling
    num_new: int = 0  # times added since the last fit

    def add(self, num_tokens: int, seconds: float) -> None:
        count = self.counts[num_tokens] = self.counts.get(num_tokens, 0) + 1
        old = self.times.get(num_tokens, seconds)
        self.times[num_tokens] = old + max(MIN_WEIGHT, 2 / (count + 1)) * (seconds - old)
        self.num_new += REFIT if count <= SETTLED else 1

    def seconds(self, num_tokens: int) -> float:
        if self.num_new >= REFIT:
            self._fit()
        sizes, fit = self.sizes, self.fit
        place = bisect_left(sizes, num_tokens)
        if place < len(sizes) and (sizes[place] == num_tokens or place > 0):
            high = fit[place]
            if sizes[place] == num_tokens:
                return high
            low = fit[place - 1]
            return low + (num_tokens - sizes[place - 1]) / (sizes[place] - sizes[place - 1]) * (high - low)
        nearest = 0 if place == 0 else -1
        size, known = sizes[nearest], fit[nearest]
        guess = known * (1 + PER_TOKEN * (num_tokens - 1)) / (1 + PER_TOKEN * (size - 1))
        if place > 1:  # a step grows on at least as it did between the two largest
            slope = (known - fit[-2]) / (size - sizes[-2])
            guess = max(guess, known + slope * (num_tokens - size))
        return guess

    def _fit(self) -> None:
        """Fit times that never fall as steps grow: neighbours in the wrong order share their weighted mean."""
        self.sizes = sorted(self.times)
        blocks: list[list[float]] = []  # mean, weight, sizes
        for size in self.sizes:
            block = [self.times[size], float(min(self.counts[size], MAX_WEIGHT)), 1]
            while blocks and blocks[-1][0] > block[0]:
                mean, weight, number = blocks.pop()
                total = weight + block[1]
                block = [(mean * weight + block[0] * block[1]) / total, total, number + block[2]]
            blocks.append(block)
        self.fit = [mean for mean, _, number in blocks for _ in range(int(number))]
        self.num_new = 0


def _band_of(num_tokens: int, num_keys: int) -> int:
    """Return the band of the mean context."""
    return (num_keys // max(num_tokens, 1) // KEYS_PER_BAND).bit_length()
