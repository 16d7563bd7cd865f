"""Stores responses in one SQLite file, accessed by one thread so that the event loop never waits.

Without a file they are kept in memory until exit. Only the newest are kept: each holds its whole conversation, so both
number and bytes are bounded.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.types import QuireError

T = TypeVar("T")
_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    body TEXT NOT NULL,
    items TEXT NOT NULL,
    messages TEXT NOT NULL
)
"""
_SIZE = "length(body) + length(items) + length(messages)"  # bytes, since all columns are ASCII JSON


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with the conversation that it continues."""

    id: str
    owner: str  # digest of the creator's key; no other key may read it
    body: dict[str, Any]  # the response body
    items: list[dict[str, Any]]  # input items
    messages: list[dict[str, Any]]  # conversation including the answer, for the next turn


class ResponseStore:
    """The newest responses, by id and owner."""

    def __init__(self, path: str | None, max_stored: int, max_bytes: int):
        self._max_stored, self._max_bytes = max_stored, max_bytes
        self._num_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-store")
        try:
            self._database = self._thread.submit(self._open, path or ":memory:").result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            what = f"The response store {path} can't be opened: {error}."
            raise QuireError("invalid_setting", what, "Give another file.", "response_store") from None

    def _open(self, path: str) -> sqlite3.Connection:
        database = sqlite3.connect(path, isolation_level=None)
        if path != ":memory:":
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
        database.execute(_TABLE)
        self._num_bytes = database.execute(f"SELECT COALESCE(SUM({_SIZE}), 0) FROM responses").fetchone()[0]
        return database

    async def put(self, response: StoredResponse) -> None:
        texts = [json.dumps(part) for part in (response.body, response.items, response.messages)]
        await self._do(lambda: self._put(response, texts))

    def _put(self, response: StoredResponse, texts: list[str]) -> None:
        insert = "INSERT OR REPLACE INTO responses (id, owner, body, items, messages) VALUES (?, ?, ?, ?, ?)"
        cursor = self._database.execute(insert, (response.id, response.owner, *texts))
        newest = cursor.lastrowid or 0
        self._num_bytes += sum(map(len, texts))
        self._drop("number <= ?", newest - self._max_stored)
        oldest = "number = (SELECT MIN(number) FROM responses) AND number < ?"
        while self._num_bytes > self._max_bytes and self._drop(oldest, newest):
            pass

    def _drop(self, where: str, *values: object) -> int:
        sizes = self._database.execute(f"DELETE FROM responses WHERE {where} RETURNING {_SIZE}", values).fetchall()
        self._num_bytes -= sum(size for (size,) in sizes)
        return len(sizes)

    async def get(self, response_id: str, owner: str) -> StoredResponse | None:
        query = "SELECT body, items, messages FROM responses WHERE id = ? AND owner = ?"
        row = await self._do(lambda: self._database.execute(query, (response_id, owner)).fetchone())
        if row is None:
            return None
        body, items, messages = (json.loads(text) for text in row)
        return StoredResponse(response_id, owner, body, items, messages)

    async def delete(self, response_id: str, owner: str) -> bool:
        return bool(await self._do(lambda: self._drop("id = ? AND owner = ?", response_id, owner)))

    async def close(self) -> None:
        await self._do(self._database.close)
        self._thread.shutdown()

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:  # a full or broken disk
            what = f"The store of responses failed: {error}."
            raise QuireError("store_failed", what, "Send store=false, or look at the server's disk.") from None
