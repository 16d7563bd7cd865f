"""Replies of `/api/chat` and `/api/generate`: JSON lines, or one body."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from quire.server.collector import SampleCollector
from quire.server.generation import GenerationRun
from quire.server.http.encoding import to_json
from quire.server.http.errors import ApiError, error_body
from quire.server.sample import Piece
from quire.text.channels.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

NANO = 1_000_000_000


class OllamaReply:
    """The reply as lines, or as one body."""

    def __init__(self, run: GenerationRun, model: str, *, is_chat: bool):
        self.run = run
        self._model, self._is_chat = model, is_chat
        self._gather = SampleCollector(run.num_samples)
        self._calls: dict[int, list[str]] = {}  # name, then pieces of the arguments, of calls that are not complete
        self.take = self._gather.take
        self.keep_alive = self._line("")

    async def body(self) -> dict[str, Any]:
        message = self._gather.samples[0].message
        calls = [_call(call.name, call.arguments) for call in message.tool_calls if call.is_complete]
        return {**self._part(message.content, message.reasoning, calls), **self._end()}

    def start(self) -> bytes:
        return b""

    def push(self, pieces: Iterable[Piece]) -> bytes:
        pieces = list(pieces)
        self.take(pieces)
        frames = []
        for event in (event for piece in pieces for event in piece.events):
            if isinstance(event, TextDelta):
                frames.append(self._line(event.text))
            elif isinstance(event, ReasoningDelta):
                frames.append(self._line("", event.text))
            elif isinstance(event, ToolCallStart):
                self._calls[event.index] = [event.name]
            elif isinstance(event, ToolCallDelta):
                self._calls[event.index].append(event.arguments)
            elif isinstance(event, ToolCallEnd):
                name, *arguments = self._calls.pop(event.index)
                if event.is_whole:
                    frames.append(self._line("", calls=[_call(name, "".join(arguments))]))
        return b"".join(frames)

    async def finish(self) -> bytes:
        return to_json({**self._part("", "", []), **self._end()}) + b"\n"

    def fail(self, error: ApiError) -> bytes:
        return to_json(error_body("ollama", error)) + b"\n"

    def _line(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> bytes:
        return to_json({**self._part(text, thinking, calls or []), "done": False}) + b"\n"

    def _part(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"model": self._model, "created_at": _now(), "response": text, **more}
        message: dict[str, Any] = {"role": "assistant", "content": text, **more}
        return {
            "model": self._model,
            "created_at": _now(),
            "message": message | ({"tool_calls": calls} if calls else {}),
        }

    def _end(self) -> dict[str, Any]:
        totals = self.run.totals
        return {
            "done": True,
            "done_reason": "length" if self._gather.samples[0].end.reason == "length" else "stop",
            **times_of(self.run),
            "prompt_eval_count": totals.prompt_tokens,
            "eval_count": totals.completion_tokens,
        }


def _call(name: str, arguments: str) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        given = {}
    return {"function": {"name": name, "arguments": given if isinstance(given, dict) else {}}}


def times_of(run: GenerationRun) -> dict[str, int]:
    """Durations in nanoseconds."""
    totals, whole = run.totals, time.monotonic() - run.started
    first = min(totals.first_token_seconds or 0.0, whole)
    queue = min(totals.queue_seconds or 0.0, first)
    return {
        "total_duration": int(whole * NANO),
        "load_duration": 0,
        "prompt_eval_duration": int((first - queue) * NANO),
        "eval_duration": int((whole - first) * NANO),
    }


def loaded_reply(model: str, part: dict[str, Any]) -> Response:
    """The reply to a request without a prompt, with which Ollama's clients load a model. It is loaded."""
    body = {"model": model, "created_at": _now(), **part, "done": True, "done_reason": "load"}
    return Response(to_json(body), media_type="application/json")


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
