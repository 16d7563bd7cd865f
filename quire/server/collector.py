"""Collects the pieces of each sample into a whole, for replies without streaming and for stored responses."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.server.sample import End, Piece
from quire.text.channels.events import ReasoningDelta
from quire.text.conversation import AssistantMessage
from quire.types import Timing, TokenLogprobs, Usage


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


class ReasoningTokens:
    """Counts reasoning tokens. A token without text yet belongs to the channel of the next text."""

    def __init__(self) -> None:
        self.count = 0
        self._held: dict[int, int] = {}  # tokens without text yet, by sample
        self._inside: dict[int, bool] = {}

    def add(self, piece: Piece) -> None:
        held = self._held.pop(piece.index, 0) + len(piece.token_ids)
        if piece.events:
            self._inside[piece.index] = isinstance(piece.events[-1], ReasoningDelta)
        elif piece.end is None:
            self._held[piece.index] = held
            return
        if self._inside.get(piece.index, False):
            self.count += held


@dataclass(slots=True)
class WholeSample:
    """One sample, complete."""

    message: AssistantMessage = field(default_factory=AssistantMessage)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: list[float] = field(default_factory=list)
    end: End = field(default_factory=lambda: End("stop", None, Usage(), Timing()))

    def add(self, piece: Piece) -> None:
        self.message.add(piece.events)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or ()
        self.prompt_logprobs += piece.prompt_logprobs or ()
        self.embedding = piece.embedding or self.embedding
        self.end = piece.end or self.end


class SampleCollector:
    """Collects all samples of a request."""

    def __init__(self, num_samples: int):
        self.samples = [WholeSample() for _ in range(num_samples)]
        self.reasoning_tokens = ReasoningTokens()

    def take(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self.samples[piece.index].add(piece)
            self.reasoning_tokens.add(piece)
