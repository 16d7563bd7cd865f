"""Drafts from a request's `prediction`: a text that the client expects the output to resemble, such as a file to edit.

A pointer follows the output through the prediction. Where the output departs from it, the pointer looks for the next
place that agrees again: first a few tokens ahead, then wherever the last two or three tokens of the output occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.speculation.occurrences import Occurrences
from quire.engine.speculation.seam import NO_DRAFT, Draft
from quire.types import Request

AHEAD = 16  # tokens that an edit may have removed or replaced
CATCH_UP = 2048  # tokens of the prediction indexed per call
LOCKED, REJOINED, REPLACED = 0.95, 0.7, 0.4  # probabilities that the next token is right
MIN_LOCKED = 4  # agreeing tokens after which the pointer is trusted


@dataclass(slots=True)
class _Pointer:
    index: Occurrences  # index of the prediction's tokens
    length: int  # number of the request's tokens that the pointer has followed
    place: int = 0  # index in the prediction of the expected next token
    num_agreed: int = MIN_LOCKED  # tokens in a row; most predictions begin as the output does
    is_lost: bool = False  # the last token disagreed, and no place that agrees was found

    def follow(self, tokens: Sequence[int]) -> None:
        """Move on with the tokens that were sampled since the last call."""
        text = self.index.tokens
        for at in range(self.length, len(tokens)):
            if self.place < len(text) and text[self.place] == tokens[at]:
                self.place += 1
                self.num_agreed += 1
                self.is_lost = self.is_lost and self.num_agreed < 2
            else:
                self._rejoin(tokens, at)
        self.length = len(tokens)

    def _rejoin(self, tokens: Sequence[int], at: int) -> None:
        """Find where the prediction goes on after `tokens[at]`, which it did not expect."""
        text, token = self.index.tokens, tokens[at]
        self.num_agreed = 0
        found = self.index.find(tokens[max(0, at - 31) : at + 1])
        if found:  # prefer a long match, then the nearest place after the pointer
            self.place, self.num_agreed = max(found, key=lambda f: (f[1], f[0] >= self.place, -abs(f[0] - self.place)))
            self.is_lost = False
            return
        ahead = range(self.place, min(len(text), self.place + AHEAD))
        skipped = next((place for place in ahead if text[place] == token), None)
        if skipped is not None:
            self.place, self.num_agreed, self.is_lost = skipped + 1, 1, False
        elif not self.is_lost:
            self.place, self.is_lost = self.place + 1, True  # one token may stand for another


class PredictionProposer:
    """Implements `Proposer`. Silent for requests without a prediction."""

    name = "prediction"

    def __init__(self) -> None:
        self._pointers: dict[str, _Pointer] = {}

    def propose(self, requests: Sequence[Request], budget: int) -> list[Draft]:
        return [self._propose(request, budget) for request in requests]

    def end(self, request: Request) -> None:
        self._pointers.pop(request.id, None)

    def _propose(self, request: Request, budget: int) -> Draft:
        predicted = request.params.prediction_ids
        if not predicted:
            return NO_DRAFT
        pointer = self._pointers.get(request.id)
        if pointer is None:
            pointer = self._pointers[request.id] = _Pointer(Occurrences(predicted), request.prompt_len)
        pointer.index.extend(CATCH_UP)
        pointer.follow(request.tokens)
        guess = list(predicted[pointer.place : pointer.place + budget])
        first = REPLACED if pointer.is_lost else LOCKED if pointer.num_agreed >= MIN_LOCKED else REJOINED
        return Draft(guess, [first * LOCKED**place for place in range(len(guess))], self.name)
