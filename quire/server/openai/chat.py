"""Replies of `/v1/chat/completions`, whole or as chunks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from quire.server.collector import SampleCollector, WholeSample, new_id
from quire.server.generation import GenerationRun
from quire.server.http.encoding import COMMENT
from quire.server.openai.chunks import ChunkWriter, usage_body
from quire.server.openai.logprobs import chat_logprobs, prompt_field, whole_chat_logprobs
from quire.server.openai.schemas import ChatBody
from quire.server.sample import Piece
from quire.text.channels.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from quire.text.tokenizer import Tokenizer


def finish_reason(reason: str, has_calls: bool, old: bool = False) -> str:
    """The reason in the API's words; `old`: in those for a client that sent `functions`."""
    return ("function_call" if old else "tool_calls") if has_calls and reason == "stop" else reason


class ChatWhole:
    """The reply as one body."""

    def __init__(self, run: GenerationRun, model: str, tokenizer: Tokenizer, body: ChatBody):
        self._run, self._model, self._tokenizer = run, model, tokenizer
        self._with_logprobs, self._with_prompt = bool(body.logprobs), body.prompt_logprobs is not None
        self._with_ids, self._old = bool(body.return_token_ids), body.functions is not None
        self._gather = SampleCollector(run.num_samples)
        self.take = self._gather.take

    async def body(self) -> dict[str, Any]:
        return {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [await self._choice(index, whole) for index, whole in enumerate(self._gather.samples)],
            "usage": usage_body(self._run.totals, self._gather.reasoning_tokens.count),
            "system_fingerprint": None,
            **({"prompt_token_ids": self._run.job.prompts[0]} if self._with_ids else {}),
        }

    async def _choice(self, index: int, whole: WholeSample) -> dict[str, Any]:
        message = whole.message.as_message()
        has_calls = bool(whole.message.tool_calls)
        message |= {"content": message["content"] or (None if has_calls else ""), "refusal": None}
        if self._old and has_calls:
            message["function_call"] = message.pop("tool_calls")[0]["function"]
        return {
            "index": index,
            "message": message,
            "logprobs": await whole_chat_logprobs(whole.logprobs, self._tokenizer) if self._with_logprobs else None,
            "finish_reason": finish_reason(whole.end.reason, has_calls, self._old),
            **({"token_ids": whole.token_ids} if self._with_ids else {}),
            **(await prompt_field(whole.prompt_logprobs, self._tokenizer) if self._with_prompt and not index else {}),
        }


class ChatStream:
    """The reply as chunks: the role, then deltas, then the finish reason, then the usage if requested."""

    keep_alive = COMMENT

    def __init__(self, run: GenerationRun, model: str, tokenizer: Tokenizer, body: ChatBody):
        self._run, self._tokenizer, self._with_logprobs = run, tokenizer, bool(body.logprobs)
        self._with_ids, self._old = bool(body.return_token_ids), body.functions is not None
        head = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._chunks = ChunkWriter(head, run, body.stream_options)
        self.finish, self.fail = self._chunks.finish, self._chunks.fail
        self._has_calls = [False] * run.num_samples

    def start(self) -> bytes:
        role = {"role": "assistant", "content": "", "refusal": None}
        more = {"prompt_token_ids": self._run.job.prompts[0]} if self._with_ids else {}
        return b"".join(self._chunk(index, role, more=more) for index in range(self._run.num_samples))

    def push(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join(self._piece(piece) for piece in pieces)

    def _piece(self, piece: Piece) -> bytes:
        frames = []
        logprobs = None
        ids = piece.token_ids if self._with_ids else []
        self._chunks.usage.count(piece)
        if self._with_logprobs and piece.logprobs:
            logprobs = chat_logprobs(piece.logprobs, self._tokenizer)
        for event in piece.events:
            delta = self._delta(piece, event)
            if delta is not None:
                frames.append(self._chunk(piece.index, delta, logprobs, ids=ids))
                logprobs, ids = None, []
        if logprobs is not None or ids:  # tokens without text yet
            frames.append(self._chunk(piece.index, {}, logprobs, ids=ids))
        if piece.end is not None:
            reason = finish_reason(piece.end.reason, self._has_calls[piece.index], self._old)
            frames.append(self._chunk(piece.index, {}, None, reason))
        return b"".join(frames)

    def _delta(self, piece: Piece, event: Event) -> dict[str, Any] | None:
        if isinstance(event, TextDelta):
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            return {"reasoning_content": event.text}
        if isinstance(event, ToolCallStart):
            self._has_calls[piece.index] = True
            if self._old:
                return {"function_call": {"name": event.name, "arguments": ""}} if event.index == 0 else None
            call = {
                "index": event.index,
                "id": new_id("call_"),
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
            return {"tool_calls": [call]}
        if isinstance(event, ToolCallDelta):
            if self._old:
                return {"function_call": {"arguments": event.arguments}} if event.index == 0 else None
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.arguments}}]}
        return None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Any = None,
        reason: str | None = None,
        *,
        ids: Sequence[int] = (),
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunks.frame({**choice, "token_ids": ids} if ids else choice, more)
