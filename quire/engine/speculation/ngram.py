"""Drafts by n-gram: the tokens that followed the last occurrence of the request's last tokens, in prompt and output.

Each request has a table from n-grams to the place behind them, which grows by the new tokens at each call. Longer
n-grams are looked up first, since they are correct more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.speculation.seam import NO_DRAFT, Draft
from quire.types import Request

LONGEST, SHORTEST = 4, 2  # tokens of an n-gram
# First guesses of the probability that a draft's first token is right, by the length of the n-gram, and each next one.
FIRST = {2: 0.4, 3: 0.6, 4: 0.75}
NEXT = 0.85


@dataclass(slots=True)
class _Seen:
    """The n-grams of one request: the place behind the last occurrence of each, excluding the request's own end."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    length: int = 0  # tokens whose n-grams are in the table: all that end before this place


class NgramProposer:
    """Implements `Proposer`."""

    name = "ngram"

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def propose(self, requests: Sequence[Request], budget: int) -> list[Draft]:
        return [self._propose(request, budget) for request in requests]

    def end(self, request: Request) -> None:
        self._seen.pop(request.id, None)

    def _propose(self, request: Request, budget: int) -> Draft:
        tokens = request.tokens
        seen = self._seen.setdefault(request.id, _Seen())
        places, last = seen.places, len(tokens)
        for end in range(max(seen.length, SHORTEST), last):  # not the n-grams at the very end, which have no successor
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                places[tuple(tokens[end - size : end])] = end
        seen.length = last
        for size in range(min(LONGEST, last - 1), SHORTEST - 1, -1):
            place = places.get(tuple(tokens[last - size :]))
            if place is not None:
                guess = tokens[place : place + budget]
                return Draft(guess, [FIRST[size] * NEXT**i for i in range(len(guess))], self.name)
        return NO_DRAFT
