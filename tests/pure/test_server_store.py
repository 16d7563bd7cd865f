"""Stored responses: found by who made them, gone when deleted or when too many."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.server.store import ResponseStore, StoredResponse
from quire.types import QuireError


def response(number: int, owner: str = "me") -> StoredResponse:
    return StoredResponse(
        f"resp_{number}", owner, {"n": number}, [{"id": "i"}], [{"role": "user", "content": "é \ud800"}]
    )


def test_put_get_delete() -> None:
    async def go() -> None:
        store = ResponseStore(None, 10)
        await store.put(response(1))
        assert await store.get("resp_1", "me") == response(1)
        assert await store.get("resp_1", "you") is None and not await store.delete("resp_1", "you")
        assert await store.delete("resp_1", "me") and await store.get("resp_1", "me") is None
        await store.close()

    asyncio.run(go())


def test_only_the_newest_are_kept() -> None:
    async def go() -> None:
        store = ResponseStore(None, 3)
        for number in range(10):
            await store.put(response(number))
        kept = [number for number in range(10) if await store.get(f"resp_{number}", "me")]
        assert kept == [7, 8, 9]
        await store.close()

    asyncio.run(go())


def test_large_ones_go_when_they_take_too_much() -> None:
    async def go() -> None:
        store = ResponseStore(None, 1000, max_bytes=1 << 20)
        for number in range(20):
            await store.put(StoredResponse(f"resp_{number}", "me", {"text": "x" * 200_000}, [], []))
        kept = [number for number in range(20) if await store.get(f"resp_{number}", "me")]
        assert kept and kept == list(range(kept[0], 20)) and 3 <= len(kept) <= 5, kept
        await store.put(StoredResponse("huge", "me", {"text": "x" * 2_000_000}, [], []))
        assert await store.get("huge", "me") is None, "what is larger than all there is room for is not kept"
        await store.put(response(99))
        assert await store.get("resp_99", "me") == response(99)
        await store.close()

    asyncio.run(go())


def test_a_file_outlives_the_server(tmp_path: Path) -> None:
    async def go() -> None:
        for _ in range(2):
            store = ResponseStore(str(tmp_path / "store.db"), 10)
            if await store.get("resp_1", "me") is None:
                await store.put(response(1))
            assert await store.get("resp_1", "me") == response(1)
            await store.close()

    asyncio.run(go())


def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("this is no database, only some text that is long enough to be looked at")
    for path in (tmp_path / "notes.txt", tmp_path / "no" / "such" / "folder.db"):
        with pytest.raises(QuireError, match="can't be opened"):
            ResponseStore(str(path), 10)
