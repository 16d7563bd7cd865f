"""Turns one sample's deltas into text, reasoning and tool calls.

`Generation` holds one `Sample` per request and pushes deltas into it; the dialects receive the resulting `Piece`s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from quire.text.channels.events import Event, TextDelta
from quire.text.delta_decoder import DeltaDecoder
from quire.text.tokenizer import Tokenizer
from quire.types import Delta, FinishReason, QuireError, Request, Timing, TokenLogprobs, Usage


class AnswerParser(Protocol):
    """Splits a model's text into channels. The merged events do not depend on the chunking."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self, *, cut: bool = False) -> list[Event]: ...


class PlainText:
    """The parser of raw completions, in which everything is text."""

    def push(self, text: str) -> list[Event]:
        return [TextDelta(text)] if text else []

    def finish(self, *, cut: bool = False) -> list[Event]:
        return []


@dataclass(slots=True)
class End:
    """A sample's end, with its usage."""

    reason: str  # stop or length
    stop_text: str | None  # the stop string that ended the text
    usage: Usage
    timing: Timing


@dataclass(slots=True)
class Piece:
    """One sample's new output."""

    index: int
    events: list[Event] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: list[float] | None = None
    end: End | None = None


class Sample:
    """One sample while it is generated."""

    def __init__(self, request: Request, tokenizer: Tokenizer, parser: AnswerParser, index: int):
        self.request = request
        self.index = index  # place among all samples of the API request
        self.ended = False
        self._num_accepted = self._num_rejected = 0  # drafts, in all engines that have worked on the request
        self._decoder = DeltaDecoder(tokenizer, request.params, request.stop_ids)
        self._parser = parser

    @property
    def num_tokens(self) -> int:
        return self._decoder.num_tokens

    def push(self, delta: Delta) -> tuple[Piece | None, bool]:
        """The piece of a delta, and whether the engine must cancel the sample since its text has ended. Raises if the
        sample failed."""
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.DEADLINE):
            raise _failure(delta)
        if delta.finish_reason is FinishReason.CANCELLED and not self._decoder.stopped:
            raise QuireError("engine_closed", "The engine was stopped before the answer was complete.")
        new = self._decoder.push(delta)
        self._num_accepted += delta.accepted
        self._num_rejected += delta.rejected
        piece = Piece(
            self.index,
            token_ids=new.token_ids,
            logprobs=new.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
            embedding=delta.embedding,
        )
        if new.text:
            piece.events = self._parser.push(new.text)
        over = delta.finish_reason is not None
        if over:
            cut = self._decoder.stopped or delta.finish_reason is FinishReason.LENGTH
            piece.events = piece.events + self._parser.finish(cut=cut)
            piece.end = self._end(delta)
        return (piece if piece.token_ids or piece.events or over or piece.prompt_logprobs else None), new.cancel

    def _end(self, delta: Delta) -> End:
        self.ended = True
        usage = delta.usage or Usage(self.request.prompt_len)
        usage.completion_tokens = self.num_tokens
        usage.accepted_prediction_tokens, usage.rejected_prediction_tokens = self._num_accepted, self._num_rejected
        reason = FinishReason.STOP if self._decoder.stopped else delta.finish_reason or FinishReason.STOP
        return End(str(reason.value), self._decoder.stop_text, usage, delta.timing or Timing())


def _failure(delta: Delta) -> QuireError:
    if delta.finish_reason is FinishReason.DEADLINE:
        return QuireError("deadline_exceeded", "The request ran out of time.", "Ask for less, or raise the timeout.")
    return QuireError(delta.error_code or "step_failed", delta.error or "The request failed.")
