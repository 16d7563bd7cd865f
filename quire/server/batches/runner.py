"""Answers the lines of batches in the engine's idle time, through the routes that answer clients.

Lines run with the lowest priority, at most one for each idle row of the engine. Lines that the server refuses for a
while (429, 503) are retried.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from quire.server.batches.database import BatchDatabase, BatchLine, BatchRecord
from quire.server.http.encoding import to_json
from quire.server.state import Server
from quire.types import QuireError

LOWEST_PRIORITY = 1000
AGAIN = frozenset({0, 429, 499, 503})  # statuses after which a line is tried again
PAUSE = 0.25  # seconds between two looks for idle rows
BACK_OFF = 1.0  # seconds after a line that could not run
IDLE = 30.0  # seconds between two looks for expired batches


class BatchRunner:
    """Runs the lines of all open batches."""

    def __init__(self, server: Server, database: BatchDatabase, app: ASGIApp):
        self._server, self._database, self._app = server, database, app
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._not_before = 0.0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        """Look again: a batch was added or cancelled."""
        self._news.set()

    async def stop(self) -> None:
        """End all lines that run; they are taken again by the next server."""
        tasks = [task for task in (self._task, *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._database.close()

    async def _run(self) -> None:
        while True:
            try:
                has_work = await self._turn()
            except QuireError as error:  # of the disk
                self._server.log.write("error", "batches", error=str(error))
                has_work = False
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), PAUSE if has_work else IDLE)
            except TimeoutError:
                continue

    async def _turn(self) -> bool:
        """Start lines for which there is room, and finish batches. Returns whether there is work left."""
        batches = await self._database.open_batches()
        for batch in batches:
            mine = {place for name, place in self._running if name == batch.id}
            if batch.status == "cancelling" or batch.expires_at <= time.time():
                await self._end(batch, "cancelled" if batch.status == "cancelling" else "expired")
                continue
            room = self._room()
            lines = await self._database.take(batch.id, max(room, 1), mine)
            if not lines and not mine:
                await self._end(batch, "completed")
            elif room > 0 and not self._server.draining:
                for line in lines:
                    task = asyncio.get_running_loop().create_task(self._answer(batch, line))
                    self._running[line.batch, line.place] = task
        return bool(batches)

    def _room(self) -> int:
        """Rows of the engine that neither clients nor batches use. Some stay free for the next client."""
        if time.monotonic() < self._not_before:
            return 0
        client = self._server.fleet.lead.client
        rows = int(client.ready.limits["max_rows"])
        others = self._server.fleet.num_live - len(self._running)
        return rows - rows // 8 - max(0, others) - len(self._running)

    async def _answer(self, batch: BatchRecord, line: BatchLine) -> None:
        try:
            body = msgspec.json.decode(line.body)
            body["priority"] = LOWEST_PRIORITY
            status, answer = await self._ask(batch, to_json(body))
            if status in AGAIN:
                self._not_before = time.monotonic() + BACK_OFF
            else:
                await self._database.answer(line, status, answer)
        except QuireError as error:
            self._not_before = time.monotonic() + BACK_OFF
            self._server.log.write("error", "batch line", batch=line.batch, line=line.place, error=str(error))
        finally:
            self._running.pop((line.batch, line.place), None)
            self._news.set()

    async def _ask(self, batch: BatchRecord, body: bytes) -> tuple[int, bytes]:
        """Status and body of the route's reply to this line."""
        state: dict[str, Any] = {"request_id": f"batch-{secrets.token_hex(6)}", "owner": batch.owner}
        if batch.tenant:
            state["tenant"] = bytes.fromhex(batch.tenant)
        scope = _scope(batch.endpoint, body, state)
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, parts = 0, []

        async def receive() -> Message:
            if given:
                return given.pop()
            await asyncio.Event().wait()  # a batch never disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        try:
            await self._app(scope, receive, send)
        except Exception as error:  # the route has answered with status 500 already
            self._server.log.write("error", "bug", id=state["request_id"], error=f"{type(error).__name__}: {error}")
        return status or 500, b"".join(parts) or b"null"

    async def _end(self, batch: BatchRecord, status: str) -> None:
        for (name, _), task in list(self._running.items()):
            if name == batch.id:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        batch.status = status
        setattr(batch, f"{status}_at", int(time.time()))
        await self._database.finish(batch)
        self._server.log.write("info", "batch", id=batch.id, status=status)


def _scope(path: str, body: bytes, state: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("batch", 0),
        "server": ("127.0.0.1", 80),
        "state": dict(state),
    }
