"""Answers of a run: the events of a stream as they come, or one body when all is there. Both notice a client that left.

A dialect gives an encoder: for a stream it turns pieces into frames, for a body it gathers them. Everything else, from
keep-alives to errors in mid-stream, is the same for all and stands here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.client.engine_client import DeltaStreamClosed
from quire.server.generation import GenerationRun
from quire.server.http.encoding import to_json
from quire.server.http.errors import ApiError, from_quire_error
from quire.server.sample import Piece
from quire.server.state import Server
from quire.types import QuireError

DISCONNECTED = "disconnected"  # the outcome of a reply whose client left
MAX_WARNINGS = 8
PEEK_SECONDS = 2.0  # an error this early still gets its own status; later it is an event


class StreamEncoder(Protocol):
    """Pieces to frames, in the order the dialect prescribes."""

    keep_alive: bytes

    def start(self) -> bytes: ...

    def push(self, pieces: Iterable[Piece]) -> bytes: ...

    async def finish(self) -> bytes: ...

    def fail(self, error: ApiError) -> bytes: ...


async def stream_reply(request: Request, run: GenerationRun, encoder: StreamEncoder, server: Server) -> Response:
    """Waits a moment for the first news: a request that is refused at once deserves a status, not an event."""
    request.state.totals = run.totals  # for the log
    watcher = asyncio.create_task(_close_when_gone(request.receive, run))
    try:
        await run.peek(min(server.config.server.keep_alive, PEEK_SECONDS))
    except DeltaStreamClosed:
        server.metrics.disconnected(run.job.route)
        request.state.outcome = DISCONNECTED
        return _nobody()
    except BaseException:
        watcher.cancel()
        run.close()
        raise
    return EventStream(run, encoder, watcher, server)


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, run: GenerationRun, encoder: StreamEncoder, watcher: asyncio.Task[None], server: Server):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **warnings_of(run)})
        del self.headers["content-length"]
        self._run, self._encoder, self._watcher, self._server = run, encoder, watcher, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run, encoder, server = self._run, self._encoder, self._server
        patience = server.config.server.keep_alive
        reader = _ClientSink(send, server.config.server.send_timeout)
        try:
            await reader.send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await reader.send_frame(encoder.start())
            while not run.done:
                pieces = await run.next(patience)
                await reader.send_frame(encoder.push(pieces) if pieces else encoder.keep_alive)
            await reader.send_frame(await encoder.finish())
        except DeltaStreamClosed:
            server.metrics.disconnected(run.job.route)
            self._broke(scope, DISCONNECTED)
        except TooSlow:
            self._broke(scope, "too_slow")
            server.metrics.cut_off(run.job.route)
            server.log.write("warning", "reader cut off", id=run.job.request_id, seconds=reader.patience)
        except QuireError as error:
            server.note_failure(run.job.route, run.job.request_id, error)
            self._broke(scope, error.code)
            await reader.send_frame(encoder.fail(from_quire_error(error, route=run.job.route)))
        except Exception:
            self._broke(scope, "internal_error")
            await reader.send_frame(encoder.fail(ApiError(500, "internal_error", "The server made a mistake.")))
            raise  # the gate logs it; the client has been told
        finally:
            self._watcher.cancel()
            run.close()
            with suppress(OSError, TooSlow):
                await reader.send({"type": "http.response.body", "body": b"", "more_body": False})

    def _broke(self, scope: Scope, outcome: str) -> None:
        """The status was sent long ago and said 200; the log and the metrics shall know better."""
        scope["state"]["outcome"] = outcome
        self._server.metrics.stream_broke(self._run.job.route, outcome)


class TooSlow(Exception):
    """A client has not read for so long that nobody waits for it any more."""


class _ClientSink:
    """The client at the other end of a stream. What it does not read fills the connection's buffer, which is small;
    then sending waits, and after `patience` seconds of that the client is given up."""

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
    """Gathers everything, then answers once. A client that hangs up before that cancels its request."""
    request.state.totals = run.totals  # for the log
    watcher = asyncio.create_task(_close_when_gone(request.receive, run))
    try:
        while not run.done:
            take(await run.next())
    except DeltaStreamClosed:
        server.metrics.disconnected(run.job.route)
        request.state.outcome = DISCONNECTED
        return _nobody()
    finally:
        watcher.cancel()
        run.close()
    return Response(to_json(await body()), headers=warnings_of(run), media_type="application/json")


def warnings_of(run: GenerationRun) -> dict[str, str]:
    """What of a schema is not enforced, in a header."""
    grammar = run.job.params.grammar
    if grammar is None or not grammar.warnings:
        return {}
    more = len(grammar.warnings) - MAX_WARNINGS
    told = "; ".join(grammar.warnings[:MAX_WARNINGS])
    return {"x-quire-warning": f"{told}; and {more} more" if more > 0 else told}


async def _close_when_gone(receive: Receive, run: GenerationRun) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    run.close()


def _nobody() -> Response:
    """For a client that is not there any more; the status is for the log."""
    return Response(status_code=499)
