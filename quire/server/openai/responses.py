"""Replies of `/v1/responses`: output items, whole or as events in the API's order."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from quire.server.blocks import BlockChange, BlockGrown, BlockOpened, ContentBlock, ContentBlocks
from quire.server.collector import ReasoningTokens, new_id
from quire.server.generation import GenerationRun
from quire.server.http.encoding import COMMENT, named_event
from quire.server.http.errors import ApiError
from quire.server.openai.logprobs import chat_logprobs
from quire.server.openai.response_schemas import ResponsesBody
from quire.server.openai.response_translate import SEALED_REASONING, namespaced, sealed
from quire.server.sample import End, Piece
from quire.text.tokenizer import Tokenizer

Store = Callable[["ResponseState"], Awaitable[None]]
_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


class ResponseState:
    """The state of one response, whose content blocks are its output items."""

    def __init__(self, run: GenerationRun, model: str, body: ResponsesBody, tokenizer: Tokenizer):
        self.run = run
        self.id = new_id("resp_")
        self.blocks = ContentBlocks()
        self.end: End | None = None
        self.error: ApiError | None = None
        self._reasoning = ReasoningTokens()
        self._body, self._model, self._tokenizer = body, model, tokenizer
        self._seals = SEALED_REASONING in (body.include or ())
        self._namespaced = namespaced(body.tools or ())
        self._created = int(time.time())
        self._ids: dict[int, str] = {}
        self._call_ids: dict[int, str] = {}
        self._logprobs: list[dict[str, Any]] = []
        self._num_told = 0  # logprobs already sent with deltas
        self._cut: ContentBlock | None = None  # the item that was incomplete at the end

    def feed(self, pieces: Iterable[Piece]) -> list[BlockChange]:
        changes: list[BlockChange] = []
        for piece in pieces:
            changes += self.blocks.feed(piece.events)
            self.end = piece.end or self.end
            self._reasoning.add(piece)
            if piece.logprobs:
                self._logprobs += chat_logprobs(piece.logprobs, self._tokenizer)["content"]
        return changes

    def close(self) -> list[BlockChange]:
        """End the open item at the end of the output."""
        changes = self.blocks.finish()
        if changes and self.status != "completed":
            self._cut = changes[-1].block
        return changes

    def item_status(self, block: ContentBlock) -> str:
        return "incomplete" if block is self._cut or not block.is_whole else "completed"

    def fresh_logprobs(self) -> list[dict[str, Any]]:
        """Logprobs that no delta has sent yet."""
        fresh = self._logprobs[self._num_told :]
        self._num_told = len(self._logprobs)
        return fresh

    def item_id(self, block: ContentBlock) -> str:
        return self._ids.setdefault(block.index, new_id(_PREFIXES[block.kind]))

    def item(self, block: ContentBlock, status: str) -> dict[str, Any]:
        if block.kind == "call":
            call_id = self._call_ids.setdefault(block.index, new_id("call_"))
            return {
                "id": self.item_id(block),
                "type": "function_call",
                "status": status,
                "call_id": call_id,
                **self.call_name(block),
                "arguments": block.text,
            }
        parts = [self.part(block)] if block.text else []
        if block.kind == "reasoning":
            item = {"id": self.item_id(block), "type": "reasoning", "summary": [], "content": parts, "status": status}
            return {**item, "encrypted_content": sealed(block.text)} if self._seals else item
        return {"id": self.item_id(block), "type": "message", "status": status, "role": "assistant", "content": parts}

    def call_name(self, block: ContentBlock) -> dict[str, str]:
        """The name fields of a call, with the namespace separated again."""
        if block.name not in self._namespaced:
            return {"name": block.name}
        namespace, name = self._namespaced[block.name]
        return {"name": name, "namespace": namespace}

    def part(self, block: ContentBlock) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": self._logprobs}

    @property
    def status(self) -> str:
        if self.error is not None:
            return "failed"
        if self.end is None:
            return "in_progress"
        return "incomplete" if self.end.reason == "length" else "completed"

    def body(self) -> dict[str, Any]:
        given, status, params = self._body, self.status, self.run.params
        error = None if self.error is None else {"code": self.error.code, "message": self.error.message}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "max_tool_calls": given.max_tool_calls,
            "metadata": given.metadata or {},
            "model": self._model,
            "output": [self.item(block, self.item_status(block)) for block in self.blocks.all],
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": given.previous_response_id,
            "reasoning": {"effort": given.reasoning.effort if given.reasoning else None, "summary": None},
            "store": given.store is not False,
            "temperature": params.temperature,
            "text": _shown(given.text) or {"format": {"type": "text"}},
            "tool_choice": _shown(given.tool_choice) or "auto",
            "tools": [_shown(tool) for tool in given.tools or ()],
            "top_p": params.top_p,
            "truncation": given.truncation or "disabled",
            "usage": self._usage() if self.end is not None else None,
            "user": given.user,
        }

    def _usage(self) -> dict[str, Any]:
        totals = self.run.totals
        return {
            "input_tokens": totals.prompt_tokens,
            "input_tokens_details": {"cached_tokens": totals.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": totals.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning.count},
            "total_tokens": totals.prompt_tokens + totals.completion_tokens,
            **({"dropped_messages": totals.dropped_messages} if totals.dropped_messages else {}),
        }

    def answer(self) -> dict[str, Any]:
        """The answer as a message of the stored conversation, without an incomplete call."""
        texts = [block.text for block in self.blocks.all if block.kind == "text"]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        calls = [
            {
                "id": self._call_ids.setdefault(block.index, new_id("call_")),
                "type": "function",
                "function": {"name": block.name, "arguments": block.text or "{}"},
            }
            for block in self.blocks.all
            if block.kind == "call" and block.is_whole
        ]
        return {**message, "tool_calls": calls} if calls else message


class ResponseWhole:
    """The reply as one body, which is stored if the client wants it."""

    def __init__(self, state: ResponseState, store: Store):
        self._state, self._store = state, store

    def take(self, pieces: Iterable[Piece]) -> None:
        self._state.feed(pieces)

    async def body(self) -> dict[str, Any]:
        self._state.close()
        await self._store(self._state)
        return self._state.body()


class ResponseStream:
    """Events: created, in progress; added, parts and done for each item; then completed, incomplete or failed."""

    keep_alive = COMMENT

    def __init__(self, state: ResponseState, store: Store):
        self._state, self._store = state, store
        self._number = 0

    def start(self) -> bytes:
        body = self._state.body()
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def push(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join(map(self._change, self._state.feed(pieces)))

    async def finish(self) -> bytes:
        last = b"".join(map(self._change, self._state.close()))
        await self._store(self._state)  # before the last event, after which a client may request it
        return last + self._event(f"response.{self._state.status}", response=self._state.body())

    def fail(self, error: ApiError) -> bytes:
        self._state.error = error
        self._state.close()
        return self._event("response.failed", response=self._state.body())

    def _event(self, name: str, /, **fields: Any) -> bytes:
        frame = named_event(name, {"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return frame

    def _change(self, change: BlockChange) -> bytes:
        block = change.block
        place = {"item_id": self._state.item_id(block), "output_index": block.index}
        if isinstance(change, BlockOpened):
            return self._opened(block, place)
        if not isinstance(change, BlockGrown):
            return self._closed(block, place)
        if block.kind == "call":
            return self._event("response.function_call_arguments.delta", **place, delta=change.text)
        place["content_index"] = 0
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **place, delta=change.text)
        logprobs = self._state.fresh_logprobs()
        return self._event("response.output_text.delta", **place, delta=change.text, logprobs=logprobs)

    def _opened(self, block: ContentBlock, place: dict[str, Any]) -> bytes:
        empty = ContentBlock(block.index, block.kind, block.name)
        item = self._state.item(empty, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        part = {**self._state.part(empty), **({"logprobs": []} if block.kind == "text" else {})}
        return added + self._event("response.content_part.added", **place, content_index=0, part=part)

    def _closed(self, block: ContentBlock, place: dict[str, Any]) -> bytes:
        done = self._event
        if block.kind == "call":
            frames = done(
                "response.function_call_arguments.done",
                **place,
                name=self._state.call_name(block)["name"],
                arguments=block.text,
            )
        else:
            part, place = self._state.part(block), {**place, "content_index": 0}
            if block.kind == "reasoning":
                frames = done("response.reasoning_text.done", **place, text=block.text)
            else:
                frames = done("response.output_text.done", **place, text=block.text, logprobs=part["logprobs"])
            frames += done("response.content_part.done", **place, part=part)
        item = self._state.item(block, self._state.item_status(block))
        return frames + done("response.output_item.done", output_index=block.index, item=item)


def _shown(value: Any) -> Any:
    return value.model_dump(exclude_none=True, by_alias=True) if hasattr(value, "model_dump") else value
