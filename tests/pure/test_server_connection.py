"""What a connection takes before it is a request: a head that is slow or without end is cut off, all others pass."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

import uvicorn

from quire.server import connection

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def with_client(play: Play) -> None:
    async def run() -> None:
        config = uvicorn.Config(echo, http=connection.Connection, log_config=None, lifespan="off")
        state = uvicorn.server.ServerState()
        make = lambda: connection.Connection(config=config, server_state=state, app_state={})  # noqa: E731
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        async with server, asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await play(reader, writer)
            writer.close()

    asyncio.run(run())


async def answered(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    return await reader.readexactly(5)


def test_a_head_may_come_in_pieces_and_requests_one_after_the_other() -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for word in (b"hello", b"again"):
            for part in (HEAD[:10], HEAD[10:], b"\r\n", word[:2], word[2:]):
                writer.write(part)
                await writer.drain()
            assert await answered(reader) == word
        writer.write((HEAD + b"\r\nfirst") + (HEAD + b"\r\nnexts"))  # both at once
        assert await answered(reader) == b"first" and await answered(reader) == b"nexts"

    with_client(play)


@pytest.mark.parametrize("begun", [b"", HEAD, HEAD + b"\r\nhello" + HEAD], ids=["nothing", "half", "half a second"])
def test_a_head_that_does_not_end_in_time_is_cut_off(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)  # the answer before it has to be out by then

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        try:
            left = await reader.read(-1)
        except ConnectionResetError:
            left = b""
        assert left.count(b"HTTP/1.1 200") == begun.count(b"hello")

    with_client(play)


@pytest.mark.parametrize(
    "endless", [b"GET /" + b"x" * 80_000, HEAD + b"a: b\r\n" * 20_000, HEAD + b"a: " + b"b" * 80_000]
)
def test_a_head_without_end_is_refused(endless: bytes) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for place in range(0, len(endless), 4096):
            writer.write(endless[place : place + 4096])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 431")

    with_client(play)
