"""Files and batches in one SQLite file, accessed by one thread so that the event loop never waits.

An answered line is committed before the next is taken, so a killed server answers every line once.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from quire.types import QuireError

T = TypeVar("T")
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, created INTEGER NOT NULL, content BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, status TEXT NOT NULL,
    record TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, place INTEGER NOT NULL, custom_id TEXT NOT NULL, body BLOB NOT NULL,
    code INTEGER NOT NULL DEFAULT 0, answer BLOB, PRIMARY KEY (batch, place)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS open_lines ON lines (batch, code);
"""
OPEN = ("in_progress", "cancelling")  # states in which a batch still has work
_FILE = "id, filename, purpose, created, length(content)"


@dataclass(slots=True)
class BatchRecord:
    """One batch; what its lines say is counted, not kept here."""

    id: str
    owner: str  # digest of the creator's key; no other key may read it
    tenant: str  # hex; separates the cached prefixes of keys
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "in_progress"
    in_progress_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line that is not answered yet."""

    batch: str
    place: int
    body: bytes


class BatchDatabase:
    """Files, batches and their lines."""

    def __init__(self, path: str | None, max_bytes: int):
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-batches")
        try:
            self._database = self._thread.submit(self._open, path or ":memory:").result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            what = f"The batch store {path} can't be opened: {error}."
            raise QuireError("invalid_setting", what, "Give another file.", "batch_store") from None

    def _open(self, path: str) -> sqlite3.Connection:
        database = sqlite3.connect(path, isolation_level=None)
        if path != ":memory:":
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
        database.executescript(_TABLES)
        return database

    # -- files

    async def put_file(self, owner: str, filename: str, purpose: str, content: bytes) -> dict[str, Any]:
        return await self._do(lambda: self._put_file(owner, filename, purpose, content))

    def _put_file(self, owner: str, filename: str, purpose: str, content: bytes) -> dict[str, Any]:
        held = self._database.execute("SELECT COALESCE(SUM(length(content)), 0) FROM files").fetchone()[0]
        if held + len(content) > self._max_bytes:
            what = f"The stored files have {held} bytes, {self._max_bytes} is the limit."
            raise QuireError("store_failed", what, "Delete files that are not needed.", "file")
        name, now = f"file-{secrets.token_hex(12)}", int(time.time())
        insert = "INSERT INTO files (id, owner, filename, purpose, created, content) VALUES (?, ?, ?, ?, ?, ?)"
        self._database.execute(insert, (name, owner, filename, purpose, now, content))
        return _file_body((name, filename, purpose, now, len(content)))

    async def file(self, name: str, owner: str) -> dict[str, Any] | None:
        query = f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ?"
        row = await self._do(lambda: self._database.execute(query, (name, owner)).fetchone())
        return None if row is None else _file_body(row)

    async def content(self, name: str, owner: str) -> bytes | None:
        query = "SELECT content FROM files WHERE id = ? AND owner = ?"
        row = await self._do(lambda: self._database.execute(query, (name, owner)).fetchone())
        return None if row is None else bytes(row[0])

    async def files(self, owner: str, limit: int, purpose: str | None) -> list[dict[str, Any]]:
        query = f"SELECT {_FILE} FROM files WHERE owner = ? AND (? IS NULL OR purpose = ?) ORDER BY number DESC LIMIT ?"
        rows = await self._do(lambda: self._database.execute(query, (owner, purpose, purpose, limit)).fetchall())
        return [_file_body(row) for row in rows]

    async def delete_file(self, name: str, owner: str) -> None:
        await self._do(lambda: self._database.execute("DELETE FROM files WHERE id = ? AND owner = ?", (name, owner)))

    # -- batches

    async def add(self, batch: BatchRecord, lines: Sequence[tuple[str, bytes]]) -> None:
        rows = [(batch.id, place, custom_id, body) for place, (custom_id, body) in enumerate(lines)]

        def add() -> None:
            with self._transaction() as database:
                database.execute(
                    "INSERT INTO batches (id, owner, status, record) VALUES (?, ?, ?, ?)",
                    (batch.id, batch.owner, batch.status, json.dumps(asdict(batch))),
                )
                database.executemany("INSERT INTO lines (batch, place, custom_id, body) VALUES (?, ?, ?, ?)", rows)

        await self._do(add)

    async def save(self, batch: BatchRecord, *, only_from: str) -> bool:
        """Keep a batch's new state if it still has the status `only_from`. Returns whether it had."""
        return await self._do(lambda: self._save(batch, only_from))

    def _save(self, batch: BatchRecord, only_from: str | None = None) -> bool:
        values = (batch.status, json.dumps(asdict(batch)), batch.id, only_from, only_from)
        update = "UPDATE batches SET status = ?, record = ? WHERE id = ? AND (? IS NULL OR status = ?)"
        return self._database.execute(update, values).rowcount > 0

    async def batch(self, name: str, owner: str) -> BatchRecord | None:
        query = "SELECT record FROM batches WHERE id = ? AND owner = ?"
        row = await self._do(lambda: self._database.execute(query, (name, owner)).fetchone())
        return None if row is None else BatchRecord(**json.loads(row[0]))

    async def batches(self, owner: str, limit: int, after: str | None) -> list[BatchRecord]:
        """The owner's batches, newest first, after the one of that name."""
        query = (
            "SELECT record FROM batches WHERE owner = ? AND (? IS NULL OR number < "
            "(SELECT number FROM batches WHERE id = ?)) ORDER BY number DESC LIMIT ?"
        )
        rows = await self._do(lambda: self._database.execute(query, (owner, after, after, limit)).fetchall())
        return [BatchRecord(**json.loads(row[0])) for row in rows]

    async def open_batches(self) -> list[BatchRecord]:
        """All batches with work left, oldest first."""
        query = f"SELECT record FROM batches WHERE status IN ({', '.join('?' * len(OPEN))}) ORDER BY number"
        rows = await self._do(lambda: self._database.execute(query, OPEN).fetchall())
        return [BatchRecord(**json.loads(row[0])) for row in rows]

    async def counts(self, name: str) -> dict[str, int]:
        """Numbers of lines: all, answered, and answered with an error."""
        query = "SELECT COUNT(*), COALESCE(SUM(code = 200), 0), COALESCE(SUM(code > 200), 0) FROM lines WHERE batch = ?"
        total, completed, failed = await self._do(lambda: self._database.execute(query, (name,)).fetchone())
        return {"total": total, "completed": completed, "failed": failed}

    # -- lines

    async def take(self, name: str, count: int, running: Collection[int]) -> list[BatchLine]:
        """The next lines without an answer, except those that run."""
        query = "SELECT place, body FROM lines WHERE batch = ? AND code = 0 ORDER BY place LIMIT ?"
        rows = await self._do(lambda: self._database.execute(query, (name, count + len(running))).fetchall())
        return [BatchLine(name, place, bytes(body)) for place, body in rows if place not in running][:count]

    async def answer(self, line: BatchLine, code: int, answer: bytes) -> None:
        """Keep a line's answer. A line that has one keeps it."""
        update = "UPDATE lines SET code = ?, answer = ? WHERE batch = ? AND place = ? AND code = 0"
        await self._do(lambda: self._database.execute(update, (code, answer, line.batch, line.place)))

    async def finish(self, batch: BatchRecord) -> None:
        """Write the answers into files, and let the lines go."""

        def finish() -> None:
            with self._transaction() as database:
                query = (
                    "SELECT custom_id, code, answer FROM lines WHERE batch = ? AND answer IS NOT NULL ORDER BY place"
                )
                rows = database.execute(query, (batch.id,)).fetchall()
                for is_error in (False, True):
                    chosen = [row for row in rows if (row[1] != 200) == is_error]
                    if chosen:
                        kind = "error" if is_error else "output"
                        content = b"".join(_answer_line(*row) for row in chosen)
                        name = f"{batch.id}_{kind}.jsonl"
                        made = self._put_file(batch.owner, name, "batch_output", content)
                        setattr(batch, f"{kind}_file_id", made["id"])
                database.execute("UPDATE lines SET body = x'', answer = NULL WHERE batch = ?", (batch.id,))
                self._save(batch)

        await self._do(finish)

    async def close(self) -> None:
        await self._do(self._database.close)
        self._thread.shutdown()

    def _transaction(self) -> sqlite3.Connection:
        self._database.execute("BEGIN")
        return self._database  # as a context it commits, or rolls back after an exception

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:  # a full or broken disk
            what = f"The store of batches failed: {error}."
            raise QuireError("store_failed", what, "Look at the server's disk.") from None


def _answer_line(custom_id: str, code: int, answer: bytes) -> bytes:
    """A line of the output file. The answer is JSON already."""
    head = json.dumps({"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id})[:-1]
    return b'%s, "response": {"status_code": %d, "body": %s}, "error": null}\n' % (head.encode(), code, answer)


def _file_body(row: Sequence[Any]) -> dict[str, Any]:
    name, filename, purpose, created, size = row
    return {
        "id": name,
        "object": "file",
        "bytes": size,
        "created_at": created,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
    }
