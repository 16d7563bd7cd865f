"""Drafts that the device proposes, by a draft model or a head of the model itself: when it shall, and how many.

The device proposes after a step has sampled, and the drafts come back with the step's tokens; they are verified by a
later plan like those of any other proposer. Proposing takes time, one pass of the draft network for each draft, so it
is asked for only where drafts of that length are expected to make tokens faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.costs.step_costs import StepCosts
from quire.engine.speculation.seam import Draft
from quire.types import Request

LONGEST = 8  # drafts proposed for one row
FIRST_GUESS = 0.7  # assumed probability that a draft is accepted if those before it are, until it is measured
PRIOR = 4.0  # weight of the first guess, in drafts
WINDOW = 200.0  # drafts per place that are remembered; older ones fade
TRIAL = 64  # where nothing pays, one of so many decisions proposes a few drafts, to notice when it would
TRIAL_LENGTH = 2
FADE = 0.1  # weight of a new measurement of the time


@dataclass(slots=True)
class _Place:
    """How often the drafts in one place of a row's proposals were right, where those before them were."""

    tried: float = 0.0
    right: float = 0.0

    def count(self, right: bool) -> None:
        if self.tried >= WINDOW:
            self.tried, self.right = 0.5 * self.tried, 0.5 * self.right
        self.tried += 1.0
        self.right += right

    @property
    def rate(self) -> float:
        return (self.right + PRIOR * FIRST_GUESS) / (self.tried + PRIOR)


class DeviceProposer:
    """Implements `Proposer` for drafts that come from the device."""

    def __init__(self, name: str, *, by_position: bool = False):
        """`by_position`: the number of drafts that are verified must not depend on which tokens they are, as
        verification by rejection needs, so a draft's chance is that of its place."""
        self.name = name
        self.by_position = by_position
        self._proposed: dict[str, tuple[int, Draft]] = {}  # request id -> its length back then, the drafts
        self._places = [_Place() for _ in range(LONGEST)]
        self._seconds: float | None = None  # measured time of one pass
        self._num_decisions = 0
        self.expected = 0.0  # accepted drafts of a row whose proposals have the length that was last found best

    def propose(self, requests: Sequence[Request], budget: int) -> list[Draft]:
        return [self._find(request, budget) for request in requests]

    def end(self, request: Request) -> None:
        self._proposed.pop(request.id, None)

    def take(self, request: Request, drafts: list[int], chances: Sequence[float]) -> None:
        """Keep drafts that follow the request's tokens, with the draft network's probability of each."""
        survival, product = [], 1.0
        for place, chance in enumerate(chances):
            if self.by_position:
                chance = self._places[min(place, LONGEST - 1)].rate
            product *= min(max(chance, 0.0), 0.99)
            survival.append(product)
        self._proposed[request.id] = len(request.tokens), Draft(drafts, survival, self.name)

    def length(self, num_rows: int, num_keys: int, costs: StepCosts) -> int:
        """Return how many drafts are worth proposing for each of `num_rows` rows with `num_keys` tokens in all; 0:
        none."""
        self._num_decisions += 1
        self.expected = FIRST_GUESS
        base = costs.seconds(num_rows, num_keys)
        if base is None:
            return 0  # the first step of all is timed alone
        if self._seconds is None:
            return TRIAL_LENGTH
        self.expected = 0.0
        keys_per_row = num_keys // max(num_rows, 1)
        best, best_rate = 0, num_rows / base
        tokens, survival = float(num_rows), 1.0
        for length, place in enumerate(self._places, start=1):
            survival *= place.rate
            tokens += num_rows * survival
            size = num_rows * (1 + length)
            seconds = costs.seconds(size, size * keys_per_row)
            assert seconds is not None
            rate = tokens / (seconds + length * self._seconds)
            if rate > best_rate:
                best, best_rate, self.expected = length, rate, tokens / num_rows - 1
        if not best and self._num_decisions % TRIAL == 0:
            return TRIAL_LENGTH
        return best

    def timed(self, num_passes: int, seconds: float) -> None:
        """Learn how long one pass of the draft network takes."""
        one = seconds / num_passes
        self._seconds = (
            one if self._seconds is None else self._seconds + FADE * (min(one, 4 * self._seconds) - self._seconds)
        )

    def score(self, request: Request) -> None:
        """Compare the request's proposals with the tokens that came since, verified or not."""
        length, draft = self._proposed.get(request.id, (0, None))
        if draft is None or len(request.tokens) <= length:
            return
        del self._proposed[request.id]
        came = request.tokens[length : length + len(draft.tokens)]
        for place, (guess, token) in enumerate(zip(draft.tokens, came, strict=False)):
            if place < LONGEST:
                self._places[place].count(guess == token)
            if guess != token:
                break

    def _find(self, request: Request, budget: int) -> Draft:
        length, draft = self._proposed.get(request.id, (0, None))
        if draft is None or length != len(request.tokens):
            return Draft()
        return Draft(draft.tokens[:budget], draft.survival[:budget], self.name)
