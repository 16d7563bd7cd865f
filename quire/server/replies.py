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
from starlette.types import Receive, Scope, Send

from quire.engine.client import Closed
from quire.server.encoding import to_json
from quire.server.errors import ApiError, from_quire_error
from quire.server.generation import Run
from quire.server.sample import Piece
from quire.server.state import Server
from quire.types import QuireError

DISCONNECTED = "disconnected"  # the outcome of a reply whose client left
PEEK_SECONDS = 2.0  # an error this early still gets its own status; later it is an event


class StreamEncoder(Protocol):
    """Pieces to frames, in the order the dialect prescribes."""

    keep_alive: bytes

    def start(self) -> bytes: ...

    def push(self, pieces: Iterable[Piece]) -> bytes: ...

    async def finish(self) -> bytes: ...

    def fail(self, error: ApiError) -> bytes: ...


async def stream_reply(request: Request, run: Run, encoder: StreamEncoder, server: Server) -> Response:
    """Waits a moment for the first news: a request that is refused at once deserves a status, not an event."""
    request.state.totals = run.totals  # for the log
    watcher = asyncio.create_task(_close_when_gone(request.receive, run))
    try:
        await run.peek(min(server.config.server.keep_alive, PEEK_SECONDS))
    except Closed:
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

    def __init__(self, run: Run, encoder: StreamEncoder, watcher: asyncio.Task[None], server: Server):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._run, self._encoder, self._watcher, self._server = run, encoder, watcher, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run, encoder, server = self._run, self._encoder, self._server
        patience = server.config.server.keep_alive
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_frame(send, encoder.start())
            while not run.done:
                pieces = await run.next(patience)
                await _send_frame(send, encoder.push(pieces) if pieces else encoder.keep_alive)
            await _send_frame(send, await encoder.finish())
        except Closed:
            server.metrics.disconnected(run.job.route)
            self._broke(scope, DISCONNECTED)
        except QuireError as error:
            server.note_failure(run.job.route, run.job.request_id, error)
            self._broke(scope, error.code)
            await _send_frame(send, encoder.fail(from_quire_error(error)))
        except Exception:
            self._broke(scope, "internal_error")
            await _send_frame(send, encoder.fail(ApiError(500, "internal_error", "The server made a mistake.")))
            raise  # the gate logs it; the client has been told
        finally:
            self._watcher.cancel()
            run.close()
            with suppress(OSError):
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _broke(self, scope: Scope, outcome: str) -> None:
        """The status was sent long ago and said 200; the log and the metrics shall know better."""
        scope["state"]["outcome"] = outcome
        self._server.metrics.stream_broke(self._run.job.route, outcome)


async def whole_reply(request: Request, run: Run, take: Callable[[Iterable[Piece]], None],
                      body: Callable[[], Awaitable[object]], server: Server) -> Response:  # fmt: skip
    """Gathers everything, then answers once. A client that hangs up before that cancels its request."""
    request.state.totals = run.totals  # for the log
    watcher = asyncio.create_task(_close_when_gone(request.receive, run))
    try:
        while not run.done:
            take(await run.next())
    except Closed:
        server.metrics.disconnected(run.job.route)
        request.state.outcome = DISCONNECTED
        return _nobody()
    finally:
        watcher.cancel()
        run.close()
    return Response(to_json(await body()), media_type="application/json")


async def _close_when_gone(receive: Receive, run: Run) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    run.close()


async def _send_frame(send: Send, frame: bytes) -> None:
    if frame:
        await send({"type": "http.response.body", "body": frame, "more_body": True})


def _nobody() -> Response:
    """For a client that is not there any more; the status is for the log."""
    return Response(status_code=499)
