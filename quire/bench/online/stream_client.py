"""A small HTTP/1.1 client over asyncio streams that sends one request and notes when each piece of the answer came.

`quire bench online` uses it, one connection a request. It reads server-sent events itself: a client that is to be timed
against a server should cost little, and every way in which an answer can go wrong must have a name.
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
EXAMPLE_BYTES = 4096  # of an error's body, to say what the server said


class Fault(Exception):
    """An answer that failed: `outcome` is counted, `detail` is shown once as an example."""

    def __init__(self, outcome: str, detail: str = ""):
        super().__init__(outcome)
        self.outcome, self.detail = outcome, detail


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the API is: `prefix` is the path before /completions."""

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
    """`http://127.0.0.1:8000`, with or without /v1 at its end."""
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
    """What a streamed answer showed, piece by piece. Times are the caller's clock."""

    piece_times: list[float] = field(default_factory=list)
    finished: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int | None = None

    def take(self, payload: str, now: float) -> None:
        """One event. A piece is an event with text, reasoning or a tool call in it."""
        if payload == "[DONE]":
            self.finished = True
            return
        try:
            event = json.loads(payload)
            if error := event.get("error"):
                raise Fault("error event", str(error.get("message", error) if isinstance(error, dict) else error))
            for choice in event.get("choices") or ():
                if _shows(choice):
                    self.piece_times.append(now)
                if choice.get("finish_reason") is not None:
                    self.finished = True
                    if not self.piece_times:  # tokens that show nothing are tokens all the same
                        self.piece_times.append(now)
            if usage := event.get("usage"):
                self.prompt_tokens, self.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
                self.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise Fault("malformed event", payload[:200]) from None


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
    """Send one request and fill `answer` as events come. Raises `Fault` for whatever went wrong."""
    async with Connection(endpoint) as connection:
        status, headers = await connection.request("POST", path, body)
        if status != 200:
            raise Fault(f"HTTP {status}", error_text(await connection.start_of_body(headers)))
        if not headers.get("content-type", "").startswith("text/event-stream"):
            start = await connection.start_of_body(headers)
            raise Fault("not a stream", start[:200].decode("utf-8", "replace"))
        parser = EventParser()
        async for part in connection.body(headers):
            now = clock()
            for payload in parser.feed(part):
                answer.take(payload, now)
        if not answer.finished:
            raise Fault("hung up", "the stream ended before the answer did")
        if not answer.piece_times:
            raise Fault("empty answer", "the stream ended well but held no choice")


async def fetch_json(endpoint: Endpoint, path: str) -> Any:
    async with Connection(endpoint) as connection:
        status, headers = await connection.request("GET", path, b"")
        start = await connection.start_of_body(headers, 1 << 20)
        if status != 200:
            raise Fault(f"HTTP {status}", error_text(start))
        try:
            return json.loads(start)
        except (ValueError, RecursionError):
            raise Fault("not JSON", start[:200].decode("utf-8", "replace")) from None


def error_text(body: bytes) -> str:
    """The message of an error's body in the form the APIs have, or how the body begins."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return body[:200].decode("utf-8", "replace")


class Connection:
    """One connection for one request, closed in every case. Errors of the network become faults."""

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint

    async def __aenter__(self) -> Connection:
        endpoint = self._endpoint
        context = ssl.create_default_context() if endpoint.tls else None
        try:
            self._reader, self._writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
        except OSError as error:
            raise Fault("no connection", error.strerror or str(error)) from None
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._writer.transport.abort()  # an answer that is given up must not linger
        if isinstance(error, (OSError, asyncio.IncompleteReadError)) and not isinstance(error, TimeoutError):
            raise Fault("hung up", str(error)) from None
        if isinstance(error, (ValueError, asyncio.LimitOverrunError)):
            raise Fault("not HTTP", str(error)) from None

    async def request(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str]]:
        """Status and headers, with lower-case names."""
        self._writer.write(self._endpoint.head(method, path, len(body)) + body)
        await self._writer.drain()
        while True:
            version, _, rest = (await self._reader.readuntil(b"\r\n")).decode("latin-1").partition(" ")
            if not version.startswith("HTTP/1."):
                raise ValueError(f"the answer begins with {version[:40]!r}")
            status, headers = int(rest[:3]), await self._headers()
            if status >= 200:  # the others only announce the real one
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
        """Parts as they arrive, whichever way the server marks the end."""
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
    """Bytes in any cut, the data of each whole event out. Names, ids and comments are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._after_return = False  # the last part ended in \r, so a \n that follows belongs to it

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
            raise Fault("malformed event", f"more than {MAX_EVENT} bytes without an end")
        events = []
        for line in lines:
            if not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        return events
