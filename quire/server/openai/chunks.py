"""Writes the chunks of OpenAI's chat and completion streams: a constant head, one choice, usage if requested, and the
end of the stream or its error.
"""

from __future__ import annotations

from typing import Any

from quire.server.collector import ReasoningTokens
from quire.server.generation import GenerationRun, Totals
from quire.server.http.encoding import DONE, data_event
from quire.server.http.errors import ApiError, error_body
from quire.server.openai.schemas import StreamOptions
from quire.server.sample import Piece


def usage_body(totals: Totals, num_reasoning: int = 0) -> dict[str, Any]:
    dropped = {"dropped_messages": totals.dropped_messages} if totals.dropped_messages else {}
    return {
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": totals.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": num_reasoning,
            "accepted_prediction_tokens": totals.accepted_prediction_tokens,
            "rejected_prediction_tokens": totals.rejected_prediction_tokens,
        },
        **dropped,
    }


class StreamUsage:
    """The usage in a stream's chunks: none, the total at the end, or the usage so far in every chunk."""

    def __init__(self, run: GenerationRun, options: StreamOptions | None):
        self._run = run
        self.at_end = options is not None and options.include_usage
        self._always = self.at_end and options is not None and options.continuous_usage_stats
        self._num_tokens = 0
        self._reasoning = ReasoningTokens()

    def count(self, piece: Piece) -> None:
        self._num_tokens += len(piece.token_ids)
        self._reasoning.add(piece)

    def field(self) -> dict[str, Any]:
        """The usage field of a chunk, empty if none is due."""
        if not self.at_end:
            return {}
        so_far = Totals(sum(map(len, self._run.job.prompts)), 0, self._num_tokens)
        return {"usage": usage_body(so_far, self._reasoning.count) if self._always else None}

    def last(self) -> dict[str, Any]:
        return usage_body(self._run.totals, self._reasoning.count)


class ChunkWriter:
    """Writes one stream's chunks."""

    def __init__(self, head: dict[str, Any], run: GenerationRun, options: StreamOptions | None):
        self._head = head
        self.usage = StreamUsage(run, options)

    def frame(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        """A chunk with one choice. `more`: further fields of the chunk."""
        return data_event({**self._head, "choices": [choice], **self.usage.field(), **(more or {})})

    async def finish(self) -> bytes:
        if not self.usage.at_end:
            return DONE
        return data_event({**self._head, "choices": [], "usage": self.usage.last()}) + DONE

    def fail(self, error: ApiError) -> bytes:
        return data_event(error_body("openai", error)) + DONE
