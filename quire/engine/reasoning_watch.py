"""Where a request stands in its reasoning, followed token by token: before it, inside it, or past it.

A `Grammar` holds one: what it enforces begins where reasoning ends, and a budget ends reasoning by its own marker. The
markers are found by bytes, not by ids: one of several tokens can be written with others, merged with what follows.
"""

from __future__ import annotations

from quire.engine.grammar.vocabulary import GrammarVocabulary
from quire.types import GrammarSpec


class ReasoningWatch:
    def __init__(self, spec: GrammarSpec, vocabulary: GrammarVocabulary):
        self._vocabulary = vocabulary
        self._opening, self._closing = spec.opens_reasoning, spec.after_reasoning
        self._open_text, self._close_text = vocabulary.text(self._opening), vocabulary.text(self._closing)
        self._budget = spec.budget
        self.restart()

    def restart(self) -> None:
        self.is_before = bool(self._open_text and self._close_text)  # it may come yet, if the model opens it
        self.is_inside = bool(self._close_text) and not self.is_before
        self._num_tokens = 0  # of the marker that opens, then of the reasoning itself
        self._tail = b""

    @property
    def is_opening(self) -> bool:
        """In the middle of the marker that opens it."""
        return self.is_before and self._num_tokens > 0

    @property
    def next_of_opening(self) -> int | None:
        """The token that opens reasoning, or goes on with opening it; None once it is too late for that."""
        if not self.is_before or self._num_tokens >= len(self._opening):
            return None
        return self._opening[self._num_tokens]

    @property
    def forced(self) -> int | None:
        """The one token that may come now, because the budget is used up; None: no such constraint."""
        if not self.is_inside or self._budget is None:
            return None
        place = self._num_tokens - self._budget
        return self._closing[place] if 0 <= place < len(self._closing) else None

    def skip(self) -> None:
        """The answer has begun: there will be no reasoning."""
        self.is_before = False

    def follow(self, token: int) -> None:
        self._num_tokens += 1
        text = self._vocabulary.token_bytes(token)
        if self.is_before:
            self._tail = (self._tail + text).lstrip()
            if self._tail.startswith(self._open_text):
                self.is_before, self.is_inside = False, True
                self._tail, self._num_tokens = self._tail[len(self._open_text) :], 0
            elif not self._open_text.startswith(self._tail):
                self.is_before = False  # it says something else
            elif not self._tail:
                self._num_tokens = 0  # white space may lead
        elif self.is_inside:
            self._tail = self._tail[-len(self._close_text) :] + text
        self.is_inside = self.is_inside and self._close_text not in self._tail
