"""Streams one chat completion and records what its client received: tokens, text, the finish reason or an error.

`quire.bench.hostile` and `quire.chaos` compare such replies token by token.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from quire.bench.online.stream_client import ClientConnection, Endpoint, EventParser, RequestFailure

CHAT = "/chat/completions"
WORDS = (
    "river",
    "stone",
    "engine",
    "paper",
    "lantern",
    "copper",
    "garden",
    "window",
    "letter",
    "market",
    "winter",
    "harbour",
    "silver",
    "kitchen",
    "bridge",
    "cloud",
    "orchard",
    "signal",
    "mountain",
    "thread",
)


@dataclass(slots=True)
class Choice:
    tokens: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    calls: str = ""
    finish: str | None = None


@dataclass(slots=True)
class StreamedReply:
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: str | None = None  # the code of an error event or reply
    status: int = 0
    longest_pause: float = 0.0
    num_events: int = 0

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"].get("code"))
            return
        self.num_events += 1
        self.usage = event.get("usage") or self.usage
        for part in event.get("choices", ()):
            choice = self.choices.setdefault(part["index"], Choice())
            delta = part.get("delta") or {}
            choice.text += (delta.get("content") or "") + (delta.get("reasoning_content") or "")
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                choice.calls += (function.get("name") or "") + (function.get("arguments") or "")
            for token in (part.get("logprobs") or {}).get("content") or ():
                choice.tokens.append(bytes(token["bytes"]))
                choice.logprobs.append(float(token["logprob"]))
            choice.finish = part.get("finish_reason") or choice.finish


async def stream_chat(
    endpoint: Endpoint,
    body: dict[str, Any],
    *,
    leave_after: int | None = None,
    slow: float = 0.0,
    timeout: float = 600.0,
) -> StreamedReply:
    """Stream one chat completion to its end. `leave_after` is the number of events after which the client disconnects,
    `slow` the seconds between its reads. Raises `RequestFailure` if the stream ends early."""
    seen = StreamedReply()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout), ClientConnection(endpoint) as connection:
        seen.status, headers = await connection.request("POST", CHAT, json.dumps(body).encode())
        if seen.status != 200:
            seen.error = error_code(await connection.start_of_body(headers))
            return seen
        parser, last, finished = EventParser(), loop.time(), False
        async for part in connection.body(headers):
            for payload in parser.feed(part):  # keep-alive comments are not events, so they do not end a pause
                now = loop.time()
                seen.longest_pause, last = max(seen.longest_pause, now - last), now
                if payload == "[DONE]":
                    finished = True
                else:
                    seen.take(json.loads(payload))
            if leave_after is not None and seen.num_events >= leave_after:
                return seen
            if slow:
                await asyncio.sleep(slow)
                last = loop.time()
        if not finished and seen.error is None:
            raise RequestFailure("hung up", "the stream ended before the answer did")
    return seen


async def send_request(
    endpoint: Endpoint, method: str, path: str, body: bytes = b"", timeout: float = 60.0
) -> tuple[int, bytes]:
    async with asyncio.timeout(timeout), ClientConnection(endpoint) as connection:
        status, headers = await connection.request(method, path, body)
        return status, await connection.start_of_body(headers, 1 << 22)


def error_code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, TypeError, KeyError):
        return "not an error body"
