"""Converts one request's tokens to text: detokenizes, finds stop strings and stop ids, and records where the text
ended.

`DeltaDecoder` and `ChatTurn` hold one `TextStream` per sample and push token ids into it. When `stopped` turns true the
request is cancelled; tokens that arrive later are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quire.text.detokenize import Detokenizer, StopScanner
from quire.text.tokenizer import Tokenizer
from quire.types import SamplingParams


class TextStream:
    """The results of `push` and `finish`, joined, are the request's text.

    - A stop string ends the text unless it is complete within the first `min_tokens` tokens, where it is plain text.
    - A stop id (end of sequence, unless `ignore_eos`, or one of `stop_token_ids`) ends the text after `min_tokens`
      tokens. Its text is not emitted unless `include_stop`; a special token's text also needs special tokens to be
      shown.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stop_ids: Collection[int] | None = None):
        """`stop_ids`: all ids that the engine stops at; by default those of the tokenizer and of `params`."""
        if stop_ids is None:
            stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else tokenizer.eos_ids))
        self._stop_ids = frozenset(stop_ids)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop
        self._detokenizer = Detokenizer(tokenizer, skip_special=params.skip_special_tokens)
        self._scanner = StopScanner(params.stop, params.include_stop)
        self.num_tokens_used = 0  # up to and including the token that ended the text
        self.stopped = False
        self.stop_reason: str | int | None = None  # the stop string or the stop id

    def push(self, delta_token_ids: Sequence[int]) -> str:
        """The text that later tokens can't change."""
        if not self._stop_ids and not self._scanner.is_active and not self.stopped:
            self.num_tokens_used += len(delta_token_ids)
            return self._detokenizer.push(delta_token_ids)
        return "".join(self._push_one(token_id) for token_id in delta_token_ids if not self.stopped)

    def _push_one(self, token_id: int) -> str:
        self.num_tokens_used += 1
        armed = self.num_tokens_used > self._min_tokens
        is_stop_id = armed and token_id in self._stop_ids
        text = ""
        if not is_stop_id or self._include_stop:
            text = self._scan(self._detokenizer.push((token_id,)), armed)
        if is_stop_id and not self.stopped:
            self.stopped, self.stop_reason = True, token_id
        return text

    def _scan(self, new_text: str, armed: bool) -> str:
        text, hit = self._scanner.push(new_text, armed)
        if hit is not None:
            self.stopped, self.stop_reason = True, hit
        return text

    def finish(self) -> str:
        """The text held back at the end of the request; empty after a stop string."""
        if isinstance(self.stop_reason, str):
            return ""
        text = self._scan(self._detokenizer.finish(), self.num_tokens_used > self._min_tokens)
        return text + self._scanner.finish()
