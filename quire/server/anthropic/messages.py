"""Replies of Anthropic's API: a message of content blocks, whole or as events in the order that the API prescribes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from quire.server.blocks import BlockChange, BlockGrown, BlockOpened, ContentBlock, ContentBlocks
from quire.server.collector import new_id
from quire.server.generation import GenerationRun
from quire.server.http.encoding import named_event
from quire.server.http.errors import ApiError, error_body
from quire.server.sample import End, Piece

_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def stop_reason(end: End, has_calls: bool) -> str:
    if end.reason == "length":
        return "max_tokens"
    if end.stop_text is not None:
        return "stop_sequence"
    return "tool_use" if has_calls else "end_turn"


class MessageState:
    """The state of one reply: its content blocks and its end."""

    def __init__(self, run: GenerationRun, model: str):
        self.run = run
        self.blocks = ContentBlocks()
        self.end: End | None = None
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}

    def feed(self, pieces: Iterable[Piece]) -> list[BlockChange]:
        changes: list[BlockChange] = []
        for piece in pieces:
            changes += self.blocks.feed(piece.events)
            self.end = piece.end or self.end
        return changes

    def take(self, pieces: Iterable[Piece]) -> None:
        self.feed(pieces)

    async def body(self) -> dict[str, Any]:
        return {
            **self._head,
            "content": [block_body(block) for block in self.blocks.all],
            **self.ending(),
            "usage": self.usage(),
        }

    def opening(self) -> dict[str, Any]:
        usage = {
            "input_tokens": sum(map(len, self.run.job.prompts)),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        return {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}

    def ending(self) -> dict[str, Any]:
        has_calls = any(block.kind == "call" for block in self.blocks.all)
        reason = stop_reason(self.end, has_calls) if self.end is not None else None
        return {"stop_reason": reason, "stop_sequence": self.end.stop_text if self.end is not None else None}

    def usage(self) -> dict[str, int]:
        totals = self.run.totals
        return {
            "input_tokens": totals.prompt_tokens - totals.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": totals.cached_tokens,
            "output_tokens": totals.completion_tokens,
        }


class MessageStream:
    """The reply as Anthropic's events."""

    keep_alive = named_event("ping", {"type": "ping"})

    def __init__(self, run: GenerationRun, model: str):
        self._state = MessageState(run, model)

    def start(self) -> bytes:
        return _event("message_start", message=self._state.opening()) + self.keep_alive

    def push(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join(map(_change_event, self._state.feed(pieces)))

    async def finish(self) -> bytes:
        last = b"".join(map(_change_event, self._state.blocks.finish()))
        delta = _event("message_delta", delta=self._state.ending(), usage=self._state.usage())
        return last + delta + _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        return named_event("error", error_body("anthropic", error, self._state.run.job.request_id))


def _event(name: str, /, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})


def _change_event(change: BlockChange) -> bytes:
    index = change.block.index
    if isinstance(change, BlockOpened):
        empty = ContentBlock(index, change.block.kind, change.block.name)
        return _event("content_block_start", index=index, content_block=block_body(empty))
    if isinstance(change, BlockGrown):
        kind, field = _DELTAS[change.block.kind]
        return _event("content_block_delta", index=index, delta={"type": kind, field: change.text})
    return _event("content_block_stop", index=index)


def block_body(block: ContentBlock) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": new_id("toolu_"), "name": block.name, "input": _parsed(block.text)}


def _parsed(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object. Incomplete JSON gives the members so far, as the SDKs parse an interrupted
    stream; text that is no JSON goes under the key from Anthropic's documentation."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return {"INVALID_JSON": arguments}
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
