"""`/v1/streams/{stream_id}`: reads a kept stream on, from the event that a client wants next."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire.server.http.errors import bad_request
from quire.server.http.replies import FollowedStream
from quire.server.http.route_parts import api_router
from quire.server.state import Server
from quire.server.streams.kept_streams import EVENT_ID


def stream_router(server: Server) -> APIRouter:
    router = api_router(server, "OpenAI", "openai")

    @router.get("/v1/streams/{stream_id}", response_model=None)
    async def resume(
        request: Request, stream_id: str, start: Annotated[int, Query(alias="from", ge=0, le=1 << 30)] = 0
    ) -> Response:
        """The events of a stream from a number on, or after the one that `Last-Event-ID` names."""
        last = request.headers.get("last-event-id")
        if last is not None:
            known = EVENT_ID.fullmatch(last)
            if known is None or known.group(1) != stream_id:
                raise bad_request("invalid_header", "Last-Event-ID names no event of this stream.")
            start = int(known.group(2)) + 1
        return FollowedStream(server.streams.find(stream_id, str(request.state.owner)), start, server)

    @router.delete("/v1/streams/{stream_id}")
    async def cancel(request: Request, stream_id: str) -> dict[str, Any]:
        """Cancel the request behind a stream."""
        stream = server.streams.find(stream_id, str(request.state.owner))
        stream.cancelled = True
        return {"id": stream_id, "object": "stream", "cancelled": not stream.is_complete}

    return router
