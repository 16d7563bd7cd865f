"""Corrects proposers' estimates by the outcomes of their drafts, verified or not.

A proposer estimates the probability that each guess is correct if those before it are. `SurvivalRecord` measures how
often guesses with such an estimate were correct, per proposer, and how each request deviates from that. Drafts that no
step verified are scored as well, by comparison with the sampled tokens, so acceptance is known while speculation rests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.speculation.seam import Draft
from quire.types import Request

NUM_BINS = 10
PRIOR = 8.0  # weight of a proposer's own estimate, in guesses
WINDOW = 400.0  # guesses per bin that are remembered; older ones fade
RATE = 0.25  # weight of a new outcome in a request's own correction
MAX_CORRECTION = 4.0
FLOOR, CEILING = 0.01, 0.995


@dataclass(slots=True)
class _Bin:
    tried: float = 0.0
    right: float = 0.0

    def count(self, right: bool) -> None:
        if self.tried >= WINDOW:
            self.tried *= 0.5
            self.right *= 0.5
        self.tried += 1.0
        self.right += right

    def rate(self, estimate: float) -> float:
        return (self.right + PRIOR * estimate) / (self.tried + PRIOR)


@dataclass(slots=True)
class _Watched:
    """One request: its open draft and its own correction."""

    correction: float = 1.0  # multiplies the odds
    length: int = 0  # tokens of the request when the draft was made
    draft: Draft = field(default_factory=Draft)


class SurvivalRecord:
    """Corrected survival estimates per proposer and request."""

    def __init__(self) -> None:
        self._bins: dict[str, list[_Bin]] = {}
        self._watched: dict[str, _Watched] = {}

    def correct(self, request: Request, draft: Draft) -> list[float]:
        """Return the corrected survival of each guess, and remember the draft to score it later."""
        watched = self._watched.setdefault(request.id, _Watched())
        watched.length, watched.draft = len(request.tokens), draft
        bins = self._bins.setdefault(draft.source, [_Bin() for _ in range(NUM_BINS)])
        survival, before, correction = 1.0, 1.0, watched.correction
        corrected: list[float] = []
        known: dict[float, float] = {1.0: 1.0}  # most guesses of a draft have one of a few chances
        for estimate in draft.survival[: len(draft.tokens)]:
            chance = round(estimate / before, 6) if before > 0 else 0.0
            before = estimate
            rate = known.get(chance)
            if rate is None:
                rate = bins[_bin_of(chance)].rate(chance)
                odds = correction * rate / max(1.0 - rate, 1e-6)
                rate = known[chance] = min(odds / (1.0 + odds), CEILING)
            survival *= rate
            corrected.append(survival)
        return corrected

    def score(self, request: Request) -> tuple[str, int] | None:
        """Compare the request's open draft with the tokens that came since. Returns its proposer and how many guesses
        were right, None without an open draft or new tokens."""
        watched = self._watched.get(request.id)
        if watched is None or not watched.draft.tokens or len(request.tokens) <= watched.length:
            return None
        draft, watched.draft = watched.draft, Draft()
        bins = self._bins[draft.source]
        came = request.tokens[watched.length : watched.length + len(draft.tokens)]
        before, num_right = 1.0, 0
        for place, token in enumerate(came):
            chance = draft.survival[place] / before if before > 0 else 0.0
            before = draft.survival[place]
            right = draft.tokens[place] == token
            if chance < 1.0:
                expected = bins[_bin_of(chance)].rate(chance)
                bins[_bin_of(chance)].count(right)
                step = RATE * (float(right) - expected)
                watched.correction = min(max(watched.correction * (1.0 + step), 1 / MAX_CORRECTION), MAX_CORRECTION)
            if not right:
                break
            num_right += 1
        return draft.source, num_right

    def end(self, request: Request) -> None:
        self._watched.pop(request.id, None)


def _bin_of(chance: float) -> int:
    return min(int(max(chance, FLOOR) * NUM_BINS), NUM_BINS - 1)
