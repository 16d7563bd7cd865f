"""`/v1/files` and `/v1/batches`: many requests at once, answered in idle time. A key sees only its own."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from quire.server.batches.database import OPEN, BatchDatabase, BatchRecord
from quire.server.batches.parsing import ENDPOINTS, read_lines, read_upload
from quire.server.batches.runner import BatchRunner
from quire.server.http.errors import ApiError, bad_request
from quire.server.http.route_parts import api_router
from quire.server.schemas import Body, Name
from quire.server.state import Server

_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
_UNITS = {"h": 3600, "d": 86400}


class BatchBody(Body):
    input_file_id: Name
    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]
    completion_window: Name = "24h"
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    output_expires_after: dict[str, Any] | None = None  # ignored: files stay until they are deleted


def batch_router(server: Server, database: BatchDatabase, runner: BatchRunner) -> APIRouter:
    router = api_router(server, "OpenAI", "openai")

    async def find_file(request: Request, name: str, param: str = "file_id") -> dict[str, Any]:
        found = await database.file(name, request.state.owner)
        if found is None:
            raise ApiError(404, "not_found", f"There is no file {name[:100]!r}.", param)
        return found

    async def find(request: Request, name: str) -> BatchRecord:
        found = await database.batch(name, request.state.owner)
        if found is None:
            raise ApiError(404, "not_found", f"There is no batch {name[:100]!r}.", "batch_id")
        return found

    @router.post("/v1/files")
    async def upload(request: Request) -> dict[str, Any]:
        """Store a file of JSON lines, one request each."""
        body = await request.body()
        upload = await asyncio.to_thread(read_upload, request.headers.get("content-type", ""), body)
        return await database.put_file(request.state.owner, upload.filename, upload.purpose, upload.content)

    @router.get("/v1/files")
    async def list_files(
        request: Request, limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000, purpose: str | None = None
    ) -> dict[str, Any]:
        found = await database.files(request.state.owner, limit, purpose)
        return {"object": "list", "data": found, "has_more": False}

    @router.get("/v1/files/{file_id}")
    async def get_file(request: Request, file_id: str) -> dict[str, Any]:
        return await find_file(request, file_id)

    @router.get("/v1/files/{file_id}/content", response_model=None)
    async def file_content(request: Request, file_id: str) -> Response:
        await find_file(request, file_id)
        content = await database.content(file_id, request.state.owner)
        return Response(content or b"", media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
        await find_file(request, file_id)
        await database.delete_file(file_id, request.state.owner)
        return {"id": file_id, "object": "file", "deleted": True}

    @router.post("/v1/batches")
    async def create(request: Request, body: BatchBody) -> dict[str, Any]:
        """Answer every line of a file. The batch's status says when it is done."""
        await find_file(request, body.input_file_id, "input_file_id")
        content = await database.content(body.input_file_id, request.state.owner)
        lines, errors = await asyncio.to_thread(read_lines, content or b"", body.endpoint)
        now = int(time.time())
        batch = BatchRecord(
            f"batch_{secrets.token_hex(12)}",
            request.state.owner,
            getattr(request.state, "tenant", b"").hex(),
            body.endpoint,
            body.input_file_id,
            body.completion_window,
            now,
            now + _seconds(body.completion_window),
            in_progress_at=now,
            metadata=body.metadata,
            errors=errors,
        )
        if errors:
            batch.status, batch.failed_at, batch.in_progress_at, lines = "failed", now, None, []
        await database.add(batch, lines)
        runner.wake()
        return await shown(batch)

    @router.get("/v1/batches")
    async def list_batches(
        request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> dict[str, Any]:
        found = await database.batches(request.state.owner, limit + 1, after)
        data = [await shown(batch) for batch in found[:limit]]
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return {"object": "list", "data": data, **ends, "has_more": len(found) > limit}

    @router.get("/v1/batches/{batch_id}")
    async def get_batch(request: Request, batch_id: str) -> dict[str, Any]:
        return await shown(await find(request, batch_id))

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> dict[str, Any]:
        """Cancel what is not answered yet. Answers so far are in the output file."""
        batch = await find(request, batch_id)
        if batch.status == "in_progress":
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            if not await database.save(batch, only_from="in_progress"):
                batch = await find(request, batch_id)  # it ended meanwhile
            runner.wake()
        if batch.status not in OPEN:
            raise bad_request("invalid_value", f"The batch is {batch.status} and can't be cancelled.", "batch_id")
        return await shown(batch)

    async def shown(batch: BatchRecord) -> dict[str, Any]:
        own = {"owner", "tenant", "errors"}
        fields = {name: getattr(batch, name) for name in BatchRecord.__slots__ if name not in own}
        errors = {"object": "list", "data": batch.errors} if batch.errors else None
        counts = await database.counts(batch.id)
        return {**fields, "object": "batch", "errors": errors, "request_counts": counts, "finalizing_at": None}

    return router


def _seconds(window: str) -> int:
    found = _WINDOW.fullmatch(window)
    if found is None:
        message = "completion_window is a number of hours or days, such as 24h."
        raise bad_request("invalid_value", message, "completion_window")
    return int(found.group(1)) * _UNITS[found.group(2)]
