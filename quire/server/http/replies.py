"""Sends the reply of a run: a stream of events, or one body. Both detect that the client disconnected.

The dialect's encoder turns pieces into frames, or collects them for a body. The rest, from keep-alives to errors inside
a stream, is shared by all dialects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.client.engine_client import DeltaStreamClosed
from quire.server.generation import GenerationRun
from quire.server.http.encoding import COMMENT, to_json
from quire.server.http.errors import ApiError, from_quire_error
from quire.server.sample import Piece
from quire.server.state import Server
from quire.server.streams.kept_streams import KeptStream
from quire.server.streams.stream_encoder import StreamEncoder
from quire.server.streams.stream_reader import start_reading
from quire.types import QuireError

DISCONNECTED = "disconnected"  # outcome of a reply whose client disconnected
MAX_WARNINGS = 8
EVENTS_AT_A_TIME = 256  # of a kept stream, sent together
PEEK_SECONDS = 2.0  # an error within this time gets an HTTP status; a later one is an event


async def stream_reply(request: Request, run: GenerationRun, encoder: StreamEncoder, server: Server) -> Response:
    """Stream a run's reply. It waits up to PEEK_SECONDS for the first pieces, so that an early refusal gets a
    status."""
    request.state.totals, request.state.submitted = run.totals, run.started  # for the log and traces
    watcher = asyncio.create_task(_close_when_gone(request.receive, run))
    try:
        resumable = server.streams.seconds_of(request.headers.get("x-quire-resume"))
        await run.peek(min(server.config.server.keep_alive, PEEK_SECONDS))
    except DeltaStreamClosed:
        server.metrics.disconnected(run.job.route)
        request.state.outcome = DISCONNECTED
        return _disconnected_response()
    except BaseException:
        watcher.cancel()
        run.close()
        raise
    if resumable is None:
        return EventStream(run, encoder, watcher, server)
    watcher.cancel()
    try:
        kept = server.streams.open(str(request.state.owner), resumable)
    except ApiError:
        run.close()
        raise
    start_reading(kept, run, encoder, server)
    return FollowedStream(kept, 0, server, warnings_of(run))


class EventStream(Response):
    """A streaming response that ends its run when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, run: GenerationRun, encoder: StreamEncoder, watcher: asyncio.Task[None], server: Server):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **warnings_of(run)})
        del self.headers["content-length"]
        self._run, self._encoder, self._watcher, self._server = run, encoder, watcher, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run, encoder, server = self._run, self._encoder, self._server
        patience = server.config.server.keep_alive
        reader = ClientSink(send, server.config.server.send_timeout)
        try:
            await reader.send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await reader.send_frame(encoder.start())
            while not run.done:
                pieces = await run.next(patience)
                await reader.send_frame(encoder.push(pieces) if pieces else encoder.keep_alive)
            await reader.send_frame(await encoder.finish())
        except DeltaStreamClosed:
            server.metrics.disconnected(run.job.route)
            self._record_failure(scope, DISCONNECTED)
        except TooSlow:
            self._record_failure(scope, "too_slow")
            server.metrics.cut_off(run.job.route)
            server.log.write("warning", "reader cut off", id=run.job.request_id, seconds=reader.patience)
        except QuireError as error:
            server.note_failure(run.job.route, run.job.request_id, error)
            self._record_failure(scope, error.code)
            await reader.send_frame(encoder.fail(from_quire_error(error, route=run.job.route)))
        except Exception:
            self._record_failure(scope, "internal_error")
            await reader.send_frame(encoder.fail(ApiError(500, "internal_error", "The server made a mistake.")))
            raise  # the gate logs it; the client has an error event
        finally:
            self._watcher.cancel()
            run.close()
            with suppress(OSError, TooSlow):
                await reader.send({"type": "http.response.body", "body": b"", "more_body": False})

    def _record_failure(self, scope: Scope, outcome: str) -> None:
        """Record a failure after status 200 was sent, for the log and the metrics."""
        scope["state"]["outcome"] = outcome
        self._server.metrics.stream_broke(self._run.job.route, outcome)


class FollowedStream(Response):
    """The events of a kept stream from a place on. Nothing ends when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, stream: KeptStream, place: int, server: Server, headers: Mapping[str, str] | None = None):
        stream_headers = {"cache-control": "no-cache", "x-accel-buffering": "no", "x-quire-stream": stream.id}
        super().__init__(headers={**stream_headers, **(headers or {})})
        del self.headers["content-length"]
        self._stream, self._place, self._server = stream, place, server
        stream.join()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream, place, settings = self._stream, self._place, self._server.config.server
        sink = ClientSink(send, settings.send_timeout)
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await sink.send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not gone.done() and not (stream.is_complete and place >= len(stream.events)):
                fresh = stream.events[place : place + EVENTS_AT_A_TIME]
                await sink.send_frame(b"".join(fresh))
                place += len(fresh)
                if not fresh:
                    await stream.wait(place, settings.keep_alive)
                    if place >= len(stream.events) and not stream.is_complete:
                        await sink.send_frame(COMMENT)
        except TooSlow:
            scope["state"]["outcome"] = "too_slow"
        finally:
            stream.leave()
            if gone.done():
                scope["state"]["outcome"] = DISCONNECTED
            gone.cancel()
            with suppress(OSError, TooSlow):
                await sink.send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class TooSlow(Exception):
    """A client that has not read for longer than the send timeout."""


class ClientSink:
    """Sends to one client. Unread data fills the connection's small buffer, then sending waits, and after `patience`
    seconds `TooSlow` is raised."""

    def __init__(self, send: Send, patience: float):
        self._send = send
        self.patience = patience
        self._given_up = False

    async def send(self, message: Message) -> None:
        if self._given_up:
            raise TooSlow
        try:
            async with asyncio.timeout(self.patience):
                await self._send(message)
        except TimeoutError:
            self._given_up = True
            raise TooSlow from None

    async def send_frame(self, frame: bytes) -> None:
        if frame:
            await self.send({"type": "http.response.body", "body": frame, "more_body": True})


async def whole_reply(
    request: Request,
    run: GenerationRun,
    take: Callable[[Iterable[Piece]], None],
    body: Callable[[], Awaitable[object]],
    server: Server,
) -> Response:
    """Collect all pieces and answer once. A client that disconnects earlier cancels its request."""
    request.state.totals, request.state.submitted = run.totals, run.started  # for the log and traces
    watcher = asyncio.create_task(_close_when_gone(request.receive, run))
    try:
        while not run.done:
            take(await run.next())
    except DeltaStreamClosed:
        server.metrics.disconnected(run.job.route)
        request.state.outcome = DISCONNECTED
        return _disconnected_response()
    finally:
        watcher.cancel()
        run.close()
    return Response(to_json(await body()), headers=warnings_of(run), media_type="application/json")


def warnings_of(run: GenerationRun) -> dict[str, str]:
    """Headers that name the parts of a schema that are not enforced."""
    grammar = run.job.params.grammar
    if grammar is None or not grammar.warnings:
        return {}
    more = len(grammar.warnings) - MAX_WARNINGS
    told = "; ".join(grammar.warnings[:MAX_WARNINGS])
    return {"x-quire-warning": f"{told}; and {more} more" if more > 0 else told}


async def _close_when_gone(receive: Receive, run: GenerationRun) -> None:
    await _until_gone(receive)
    run.close()


def _disconnected_response() -> Response:
    """The response for a disconnected client, whose status is for the log only."""
    return Response(status_code=499)
