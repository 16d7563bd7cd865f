"""Turns the deltas of one request into text: the single home of that step for `LLM`, `AsyncLLM` and the server.

`edge.Reply` and `server.sample.Sample` hold one `DeltaDecoder` per request and push every delta of that request.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from quire.text.stream import TextStream
from quire.text.tokenizer import Tokenizer
from quire.types import Delta, FinishReason, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class DecodedDelta:
    """One delta as text, without the tokens after the one that ended the text."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None  # STOP as soon as a stop string or a stop id has ended the text
    cancel: bool  # the text ended here while the engine still generates: the caller must cancel the request


class DeltaDecoder:
    """Decodes the deltas of one request, in order. Without a tokenizer every text is empty."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, stop_ids: Collection[int]):
        self._stream = None if tokenizer is None else TextStream(tokenizer, params, stop_ids)
        self.num_tokens = 0  # tokens of the text, including the one that ended it
        self.stopped = False  # a stop string or a stop id has ended the text; later tokens are ignored

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the text, if one did."""
        reason = None if self._stream is None else self._stream.stop_reason
        return reason if isinstance(reason, str) else None

    def push(self, delta: Delta) -> DecodedDelta:
        """Returns what the delta adds. Once the text has ended, only the engine's final delta still has a meaning."""
        if self.stopped:
            return DecodedDelta("", [], None, FinishReason.STOP, cancel=False)
        text, token_ids = "", delta.token_ids
        if self._stream is not None and token_ids:
            before = self._stream.num_tokens_used
            text = self._stream.push(token_ids)
            used = self._stream.num_tokens_used - before
            token_ids = token_ids if used == len(token_ids) else token_ids[:used]
            self.stopped = self._stream.stopped
        self.num_tokens += len(token_ids)
        logprobs = None if delta.logprobs is None else delta.logprobs[: len(token_ids)]
        reason = delta.finish_reason
        if self.stopped and reason in (None, FinishReason.LENGTH):
            reason = FinishReason.STOP
        if reason is not None and self._stream is not None:
            text += self._stream.finish()
        return DecodedDelta(text, token_ids, logprobs, reason, cancel=self.stopped and delta.finish_reason is None)
