"""A small HTTP/1.1 client over asyncio streams that records the time of each piece of a streamed answer.

The online and hostile benchmarks and the chaos gate use it, with one connection per request. It parses server-sent
events itself, so that the client costs little CPU time and each kind of failure has a distinct name.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from quire.types import QuireError

MAX_HEADERS = 100
MAX_CHUNK = 1 << 24
MAX_EVENT = 1 << 24
EXAMPLE_BYTES = 4096  # of an error's body, kept as an example


class RequestFailure(Exception):
    """A failed exchange: `outcome` is counted, one `detail` per outcome is shown as an example."""

    def __init__(self, outcome: str, detail: str = ""):
        super().__init__(outcome)
        self.outcome, self.detail = outcome, detail


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of an API; `prefix` is the path before /completions."""

    host: str
    port: int
    tls: bool
    prefix: str
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def head(self, method: str, path: str, body_len: int) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Accept: text/event-stream, application/json",
            "Content-Type: application/json",
            f"Content-Length: {body_len}",
            "Connection: close",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse_url(url: str, api_key: str | None = None) -> Endpoint:
    """Parse a URL such as `http://127.0.0.1:8000`, with or without /v1 at its end."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _bad_url(url) from None
    if parts.username is not None:  # not repeated: it may hold a password
        raise QuireError("usage", "The URL names a user.", "Give the key with --api-key.")
    plain = url.isascii() and url.isprintable() and " " not in url and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise _bad_url(url)
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise QuireError("usage", "--api-key holds characters that no header can.", "Check for stray line ends.")
    tls, path = parts.scheme == "https", parts.path.rstrip("/")
    prefix = path if path.endswith("/v1") else path + "/v1"
    return Endpoint(parts.hostname, port or (443 if tls else 80), tls, prefix, api_key)


def _bad_url(url: str) -> QuireError:
    return QuireError("usage", f"{url!r:.200} is not the URL of a server.", "It looks like http://127.0.0.1:8000.")


# ---------------------------------------------------------------------------------------------------------------------
# One exchange


@dataclass(slots=True)
class Answer:
    """Piece times and token counts of a streamed answer. Times are those of the caller's clock."""

    piece_times: list[float] = field(default_factory=list)
    finished: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int | None = None

    def take(self, payload: str, now: float) -> None:
        """Record one event. An event with text, reasoning or a tool call counts as a piece."""
        if payload == "[DONE]":
            self.finished = True
            return
        try:
            event = json.loads(payload)
            if error := event.get("error"):
                raise RequestFailure(
                    "error event", str(error.get("message", error) if isinstance(error, dict) else error)
                )
            for choice in event.get("choices") or ():
                if _shows(choice):
                    self.piece_times.append(now)
                if choice.get("finish_reason") is not None:
                    self.finished = True
                    if not self.piece_times:  # all tokens were invisible, such as special tokens
                        self.piece_times.append(now)
            if usage := event.get("usage"):
                self.prompt_tokens, self.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
                self.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise RequestFailure("malformed event", payload[:200]) from None


def _shows(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    shown = (
        choice.get("text"),
        delta.get("content"),
        delta.get("reasoning_content"),
        delta.get("reasoning"),
        delta.get("tool_calls"),
    )
    return any(shown)


async def stream(endpoint: Endpoint, path: str, body: bytes, answer: Answer, clock: Callable[[], float]) -> None:
    """Send one request and fill `answer` as events arrive. Raises `RequestFailure` for every kind of failure."""
    async with ClientConnection(endpoint) as connection:
        status, headers = await connection.request("POST", path, body)
        if status != 200:
            raise RequestFailure(f"HTTP {status}", error_text(await connection.start_of_body(headers)))
        if not headers.get("content-type", "").startswith("text/event-stream"):
            start = await connection.start_of_body(headers)
            raise RequestFailure("not a stream", start[:200].decode("utf-8", "replace"))
        parser = EventParser()
        async for part in connection.body(headers):
            now = clock()
            for payload in parser.feed(part):
                answer.take(payload, now)
        if not answer.finished:
            raise RequestFailure("hung up", "the stream ended before the answer did")
        if not answer.piece_times:
            raise RequestFailure("empty answer", "the stream ended well but held no choice")


async def fetch_json(endpoint: Endpoint, path: str) -> Any:
    async with ClientConnection(endpoint) as connection:
        status, headers = await connection.request("GET", path, b"")
        start = await connection.start_of_body(headers, 1 << 20)
        if status != 200:
            raise RequestFailure(f"HTTP {status}", error_text(start))
        try:
            return json.loads(start)
        except (ValueError, RecursionError):
            raise RequestFailure("not JSON", start[:200].decode("utf-8", "replace")) from None


def error_text(body: bytes) -> str:
    """Return the message of an API error's body, or the beginning of any other body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return body[:200].decode("utf-8", "replace")


class ClientConnection:
    """A connection for one request, which is always closed. Network and protocol errors become `RequestFailure`."""

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint

    async def __aenter__(self) -> ClientConnection:
        endpoint = self._endpoint
        context = ssl.create_default_context() if endpoint.tls else None
        try:
            self._reader, self._writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
        except OSError as error:
            raise RequestFailure("no connection", error.strerror or str(error)) from None
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._writer.transport.abort()  # closes at once, without waiting for the rest of the answer
        if isinstance(error, (OSError, asyncio.IncompleteReadError)) and not isinstance(error, TimeoutError):
            raise RequestFailure("hung up", str(error)) from None
        if isinstance(error, (ValueError, asyncio.LimitOverrunError)):
            raise RequestFailure("not HTTP", str(error)) from None

    async def request(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str]]:
        """Send a request and return the status and the headers, with lower-case names."""
        self._writer.write(self._endpoint.head(method, path, len(body)) + body)
        await self._writer.drain()
        while True:
            version, _, rest = (await self._reader.readuntil(b"\r\n")).decode("latin-1").partition(" ")
            if not version.startswith("HTTP/1."):
                raise ValueError(f"the answer begins with {version[:40]!r}")
            status, headers = int(rest[:3]), await self._headers()
            if status >= 200:  # 1xx responses precede the final one
                return status, headers

    async def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for _ in range(MAX_HEADERS):
            line = (await self._reader.readuntil(b"\r\n")).decode("latin-1").strip()
            if not line:
                return headers
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        raise ValueError(f"more than {MAX_HEADERS} headers")

    async def body(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """Yield parts of the body as they arrive: chunked, by content length, or until the connection closes."""
        reader = self._reader
        if "chunked" in headers.get("transfer-encoding", "").lower():
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                if not 0 < size <= MAX_CHUNK:
                    raise ValueError(f"a chunk of {size} bytes")
                yield (await reader.readexactly(size + 2))[:-2]
            return
        left = int(headers["content-length"]) if "content-length" in headers else None
        while left is None or left > 0:
            part = await reader.read(1 << 16 if left is None else min(left, 1 << 16))
            if not part:
                if left:
                    raise asyncio.IncompleteReadError(b"", left)
                return
            left = None if left is None else left - len(part)
            yield part

    async def start_of_body(self, headers: dict[str, str], limit: int = EXAMPLE_BYTES) -> bytes:
        start = b""
        async for part in self.body(headers):
            start += part
            if len(start) >= limit:
                break
        return start[:limit]


# ---------------------------------------------------------------------------------------------------------------------
# Server-sent events


class EventParser:
    """Parses server-sent events from bytes in arbitrary pieces. Ignores event names, ids and comments."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._after_return = False  # the last part ended in \r, so a leading \n belongs to the same line end

    def feed(self, part: bytes) -> list[str]:
        if self._after_return and part:
            self._after_return = False
            part = part.removeprefix(b"\n")
        if not part:
            return []
        self._after_return = part.endswith(b"\r")
        text = self._rest + part
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        if len(self._rest) > MAX_EVENT:
            raise RequestFailure("malformed event", f"more than {MAX_EVENT} bytes without an end")
        events = []
        for line in lines:
            if not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        return events
