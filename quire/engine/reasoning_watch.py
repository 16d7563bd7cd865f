"""Tracks token by token whether a request is before, inside or past its reasoning.

A `Grammar` has one: its constraint begins where reasoning ends, and a budget ends reasoning by forcing the end marker.
Markers are matched by bytes, not by ids, since a tokenizer can split a marker or merge it with the text behind it.
"""

from __future__ import annotations

from quire.engine.grammar.vocabulary import GrammarVocabulary
from quire.types import GrammarSpec


class ReasoningWatch:
    """The position of one request relative to its reasoning."""

    def __init__(self, spec: GrammarSpec, vocabulary: GrammarVocabulary):
        self._vocabulary = vocabulary
        self._opening, self._closing = spec.opens_reasoning, spec.after_reasoning
        self._open_text, self._close_text = vocabulary.text(self._opening), vocabulary.text(self._closing)
        self._budget = spec.budget
        self.restart()

    def restart(self) -> None:
        self.is_before = bool(self._open_text and self._close_text)  # True while the model may still open reasoning
        self.is_inside = bool(self._close_text) and not self.is_before
        self._num_tokens = 0  # tokens of the opening marker, then of the reasoning itself
        self._tail = b""

    @property
    def is_opening(self) -> bool:
        """True while the opening marker is written in part."""
        return self.is_before and self._num_tokens > 0

    @property
    def next_of_opening(self) -> int | None:
        """The next token of the opening marker; None if reasoning can no longer be opened."""
        if not self.is_before or self._num_tokens >= len(self._opening):
            return None
        return self._opening[self._num_tokens]

    @property
    def forced(self) -> int | None:
        """The only allowed token once the budget is spent; None: no such constraint."""
        if not self.is_inside or self._budget is None:
            return None
        place = self._num_tokens - self._budget
        return self._closing[place] if 0 <= place < len(self._closing) else None

    @property
    def rest_of_closing(self) -> list[int]:
        """The tokens of the end marker that a spent budget still forces, in order."""
        if self.forced is None or self._budget is None:
            return []
        return list(self._closing[self._num_tokens - self._budget :])

    def skip(self) -> None:
        """Record that the answer has begun without reasoning."""
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
                self.is_before = False  # the text differs from the marker
            elif not self._tail:
                self._num_tokens = 0  # white space may precede the marker
        elif self.is_inside:
            self._tail = self._tail[-len(self._close_text) :] + text
        self.is_inside = self.is_inside and self._close_text not in self._tail
