"""uvicorn's connection of one client, with bounds on everything it may hold in every state of the parser.

`run` passes this class to uvicorn. A head is bounded in time, size and number of fields; bytes that are neither head
nor body (chunk sizes, extensions, trailers) have their own bounds; pipelined requests are few. Replies made here, below
the application, have the caller's error format and a request id. The gate bounds the pace of bodies, `replies` bounds
clients that do not read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from quire.server.http.encoding import to_json
from quire.server.http.errors import ApiError, dialect_of, error_body
from quire.server.http.open_connections import OpenConnections
from quire.server.http.request_ids import request_id

HEAD_SECONDS = 30.0
LINGER_SECONDS = 2.0  # time to read the reply to a request that was not read to its end
PIECE = 16 << 10  # bytes parsed between two checks of the bounds; a bound may be exceeded by this much
MAX_HEAD = 64 << 10
MAX_FIELDS = 128  # per head, and per trailer section
MAX_FRAMING = 32 << 10  # framing bytes: between two bytes of a body, and in total beyond the body's size
MAX_AHEAD = 8  # pipelined requests
MAX_LINGER = 32 << 20  # bytes discarded while the client reads the reply

_MALFORMED = ApiError(400, "malformed_request", "This is not valid HTTP. Check what stands between client and server.")
_HEAD_TOO_LARGE = ApiError(
    431, "headers_too_large", f"The head has more than {MAX_HEAD} bytes or {MAX_FIELDS} fields. Send fewer headers."
)
_FRAMING_TOO_LARGE = ApiError(
    431,
    "headers_too_large",
    f"The body's chunks need more bytes than they hold, or its trailers have more than {MAX_FRAMING} bytes or "
    f"{MAX_FIELDS} fields. Send larger chunks without extensions and trailers.",
)
_FULL = ApiError(503, "overloaded", "The server holds too many bytes of requests. Try again a little later.")
_BUG = ApiError(500, "internal_error", "The server made a mistake. It has been logged.")
_NO_ROOM = ApiError(503, "overloaded", "The server has too many open connections. Try again a little later.")


@dataclass(slots=True)
class _Exchange:
    """A request whose reply is not complete."""

    cycle: RequestResponseCycle
    head_bytes: int


class _Refused(Exception):
    def __init__(self, error: ApiError):
        super().__init__(error.message)
        self.error = error


class _StopReading(Exception):
    """Ends reading on this connection; requests read before are still answered."""


class ServerConnection(HttpToolsProtocol):
    """One client's connection. uvicorn creates it."""

    def __init__(self, *args: Any, others: OpenConnections, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._others = others
        self._application, self.app = self.app, self._serve
        self._socket: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._exchanges: deque[_Exchange] = deque()  # in request order; the application handles the first
        self._in_head = self._in_body = False  # parser state; neither: between requests
        self._num_framing = 0  # bytes that belong to no body: head, chunk framing, between requests
        self._since_body = 0  # framing bytes after the last byte of the body
        self._num_body = self._num_fields = 0  # counts of the request being parsed
        self._held = 0  # bytes counted in `others` for this connection
        self._keep_alive_after = False  # keep-alive of the request being parsed
        self._stopping = False  # the server is shutting down
        self._ignores_input = False  # no more requests are read; input is discarded
        self._num_ignored = 0
        self._closing = False
        self._final_reply = b""  # the refusal to send after the open replies

    # -- called by uvicorn and the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        super().connection_made(_LingeringTransport(transport, self))  # type: ignore[arg-type]
        self.flow = _Flow(self.transport, self)
        if not self._others.enter(self):
            self._ignores_input = self._closing = True
            transport.write(self._reply_to(_NO_ROOM))
            transport.close()
            return
        self._start_timer(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = self._ignores_input = True
        self._end_timer()
        self._unset_keepalive_if_required()
        for exchange in self._exchanges:
            exchange.cycle.disconnected = True
            exchange.cycle.message_event.set()
        self._exchanges.clear()
        self.pipeline.clear()
        self._in_head = False
        self._settle()
        self._others.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for place in range(0, len(data), PIECE):
            if self._ignores_input:
                self._ignore(len(data) - place)
                return
            try:
                self._feed(memoryview(data)[place : place + PIECE])
            except _Refused as refused:
                self._refuse(refused.error)
            except _StopReading:
                self._stop_reading()

    def shutdown(self) -> None:
        self._stopping = True
        super().shutdown()

    # -- called by the parser

    def on_message_begin(self) -> None:
        if len(self._exchanges) > MAX_AHEAD:
            raise _StopReading
        self._unset_keepalive_if_required()
        self._in_head = True
        self._num_framing = self._since_body = self._num_body = self._num_fields = 0
        if not self._exchanges:
            self._start_timer(HEAD_SECONDS)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise _Refused(_HEAD_TOO_LARGE if self._in_head else _FRAMING_TOO_LARGE)
        if self._in_head:  # trailers are dropped: they must not add to the headers that were checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._end_timer()
        self._unset_keepalive_if_required()
        self._others.end_wait(self)
        head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if head_bytes > MAX_HEAD:
            raise _Refused(_HEAD_TOO_LARGE)
        super().on_headers_complete()
        self._in_body = True
        self._exchanges.append(_Exchange(self.cycle, head_bytes))
        self._keep_alive_after, self.cycle.keep_alive = self.cycle.keep_alive, False
        self._num_framing = self._since_body = self._num_fields = 0
        if self.pipeline:  # uvicorn pauses reading here, but a paused socket does not notice a disconnect
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        self._since_body = -len(body)  # `_feed` adds the whole piece
        self._num_framing -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Allow keep-alive from here on. Earlier, the rest of the body would be parsed as a request."""
        if not self.cycle.response_started and not self._stopping:
            self.cycle.keep_alive = self._keep_alive_after
        self._in_body = False
        self._num_framing = self._since_body = 0
        super().on_message_complete()

    # -- requests

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. If it ends without a reply, which is a bug, send an error in the caller's format."""
        started = False

        async def send_on(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        async def receive_and_count() -> Message:
            message = await receive()
            self._settle()
            return message

        try:
            await self._application(scope, receive_and_count, send_on)
        except Exception as error:
            if started:
                raise
            self.logger.error("The application failed without a reply.", exc_info=error)
        if not started:
            headers, body = self._parts_of(_BUG, dict(scope["headers"]), scope["path"])
            await send({"type": "http.response.start", "status": _BUG.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def on_response_complete(self) -> None:
        if self._exchanges:
            self._exchanges.popleft()
        self._settle()
        super().on_response_complete()
        if self._closing or self._exchanges:
            return
        if self._final_reply:
            self._reply_and_close(self._final_reply)
        elif self._ignores_input:
            self.close_lingering()
        else:
            self._others.begin_wait(self)
            if self._in_head:  # its time limit starts once the earlier replies are sent
                self._start_timer(HEAD_SECONDS)

    def _feed(self, piece: memoryview) -> None:
        """Parse `piece` and check every bound."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # no upgrade is supported: answer in HTTP/1.1 and close
            raise _StopReading from None
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, (_Refused, _StopReading)):
                raise error.__context__ from None
            raise _Refused(_MALFORMED) from None
        self._num_framing += len(piece)
        self._since_body += len(piece)
        if not self._in_body and self._num_framing > MAX_HEAD:
            raise _Refused(_HEAD_TOO_LARGE)
        if self._in_body and (self._since_body > MAX_FRAMING or self._num_framing > MAX_FRAMING + self._num_body):
            raise _Refused(_FRAMING_TOO_LARGE)
        if not self._settle():
            raise _Refused(_FULL)

    def ahead_bytes(self) -> int:
        """Bytes of pipelined requests that wait."""
        return sum(one.head_bytes + len(one.cycle.body) for one in islice(self._exchanges, 1, None))

    def _settle(self) -> bool:
        """Update the count of held bytes. Returns False if all connections together hold too many."""
        held = sum(one.head_bytes + len(one.cycle.body) for one in self._exchanges)
        held += self._num_framing if self._in_head else 0
        change, self._held = held - self._held, held
        return self._others.hold(change)

    # -- ending the connection

    def _start_timer(self, seconds: float) -> None:
        self._end_timer()
        self._timer = self.loop.call_later(seconds, self.drop)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def drop(self) -> None:
        if self._socket is not None and not self._socket.is_closing():
            self._socket.abort()

    def _refuse(self, error: ApiError) -> None:
        """Send an error after the open replies, without the application, and end the connection."""
        self._ignores_input = True
        self._end_timer()
        reply = self._reply_to(error)
        if self._in_body and self._exchanges:
            broken = self._exchanges[-1].cycle
            if broken.response_started:
                return  # its reply is completed and closes the connection
            self._exchanges.pop()
            broken.disconnected = True
            broken.message_event.set()
            if self._exchanges:  # the request was still waiting in the pipeline
                self.pipeline.popleft()
        self._settle()
        if self._exchanges:
            self._final_reply = reply
        else:
            self._reply_and_close(reply)

    def _reply_and_close(self, reply: bytes) -> None:
        self.transport.write(reply)
        self.close_lingering()

    def _reply_to(self, error: ApiError) -> bytes:
        lines, body = self._parts_of(error, dict(self.headers or []), (self.scope or {}).get("path", ""))
        lines = [*self.server_state.default_headers, *lines]
        return b"".join((STATUS_LINE[error.status], *(b"%s: %s\r\n" % line for line in lines), b"\r\n", body))

    def _parts_of(
        self, error: ApiError, headers: Mapping[bytes, bytes], path: str
    ) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Headers and body of an error reply to a request with these headers and path, as far as they are parsed."""
        name = request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        self._others.report(name, error)
        dialect = dialect_of(path)
        body = to_json(error_body(dialect, error, name))
        lines = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"x-request-id", name.encode()),
        ]
        if dialect == "anthropic":
            lines.append((b"request-id", name.encode()))
        return lines, body

    def _stop_reading(self) -> None:
        self._ignores_input = True
        self._end_timer()
        if self._exchanges:
            self._exchanges[-1].cycle.keep_alive = False
        else:
            self.close_lingering()

    def close_lingering(self) -> None:
        """Close the connection. If the client may still be sending, send EOF first and discard its input: an unread
        byte would make the kernel reset the connection, and the reply would be lost."""
        assert self._socket is not None
        if self._closing or self._socket.is_closing():
            return
        self._closing = True
        self._unset_keepalive_if_required()
        if not (self._in_head or self._in_body or self._ignores_input or self.pipeline):
            self._socket.close()
            return
        self._ignores_input = True
        self._others.begin_wait(self)
        self.pipeline.clear()  # waiting requests are not answered
        self._socket.write_eof()
        self.flow.resume_reading()
        self._end_timer()
        self._timer = self.loop.call_later(LINGER_SECONDS, self._socket.close)

    @property
    def closing(self) -> bool:
        return self._closing

    def _ignore(self, count: int) -> None:
        self._num_ignored += count
        if self._num_ignored > MAX_LINGER and self._socket is not None:
            if self._closing:
                self._socket.close()
            else:
                self.flow.pause_reading()


class _Flow(FlowControl):
    """Flow control that stays paused while pipelined requests hold many bytes, even if the application resumes it."""

    def __init__(self, transport: asyncio.Transport, connection: ServerConnection):
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if self._connection.ahead_bytes() <= HIGH_WATER_LIMIT:
            super().resume_reading()


class _LingeringTransport:
    """The transport that uvicorn sees. Its `close` goes through `ServerConnection.close_lingering`."""

    def __init__(self, transport: asyncio.Transport, connection: ServerConnection):
        self._connection = connection
        self._is_closing = transport.is_closing
        self.write = transport.write
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info
        self.close = connection.close_lingering

    def is_closing(self) -> bool:
        return self._connection.closing or self._is_closing()
