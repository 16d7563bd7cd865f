"""Stored responses: found by who made them, gone when deleted or when too many."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.server.store import ResponseStore, StoredResponse
from quire.types import QuireError

MANY = 1 << 30


def response(number: int, owner: str = "me") -> StoredResponse:
    return StoredResponse(
        f"resp_{number}", owner, {"n": number}, [{"id": "i"}], [{"role": "user", "content": "é \ud800"}]
    )


def test_put_get_delete() -> None:
    async def go() -> None:
        store = ResponseStore(None, 10, MANY)
        await store.put(response(1))
        assert await store.get("resp_1", "me") == response(1)
        assert await store.get("resp_1", "you") is None and not await store.delete("resp_1", "you")
        assert await store.delete("resp_1", "me") and await store.get("resp_1", "me") is None
        await store.close()

    asyncio.run(go())


def test_only_the_newest_are_kept() -> None:
    async def go() -> None:
        store = ResponseStore(None, 3, MANY)
        for number in range(10):
            await store.put(response(number))
        kept = [number for number in range(10) if await store.get(f"resp_{number}", "me")]
        assert kept == [7, 8, 9]
        await store.close()

    asyncio.run(go())


def test_large_ones_go_when_they_take_too_much(tmp_path: Path) -> None:
    async def go() -> None:
        path = str(tmp_path / "store.db")
        for run in range(2):  # what a file held before counts
            store = ResponseStore(path, 100, 5_000)
            for number in range(10 * run, 10 * run + 10):
                one = response(number)
                await store.put(StoredResponse(one.id, one.owner, {"text": "x" * 1500}, one.items, one.messages))
            kept = [number for number in range(20) if await store.get(f"resp_{number}", "me")]
            assert kept == [10 * run + number for number in (7, 8, 9)]
            await store.close()
        store = ResponseStore(path, 100, 5_000)
        assert await store.delete("resp_19", "me")
        await store.put(response(1))
        kept = [number for number in range(20) if await store.get(f"resp_{number}", "me")]
        assert kept == [1, 17, 18], "what was deleted makes room"
        await store.close()

    asyncio.run(go())


def test_a_file_outlives_the_server(tmp_path: Path) -> None:
    async def go() -> None:
        for _ in range(2):
            store = ResponseStore(str(tmp_path / "store.db"), 10, MANY)
            if await store.get("resp_1", "me") is None:
                await store.put(response(1))
            assert await store.get("resp_1", "me") == response(1)
            await store.close()

    asyncio.run(go())


def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("this is no database, only some text that is long enough to be looked at")
    for path in (tmp_path / "notes.txt", tmp_path / "no" / "such" / "folder.db"):
        with pytest.raises(QuireError, match="can't be opened"):
            ResponseStore(str(path), 10, MANY)
