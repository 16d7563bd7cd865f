"""A stand-in for a server that streams completions: a thread with an asyncio server on the loopback address.

Online benchmark tests say what happens to each request with a `Behaviour`; requests are kept for the test to look at.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass
class Exchange:
    """One request as it came, and the way to answer it."""

    index: int  # of the requests for answers, in the order they came
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def begin(self, kind: str = "text/event-stream", status: str = "200 OK") -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        await self.send(head.encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, value: Any) -> None:
        await self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def piece(self, text: str, reason: str | None = None) -> None:
        shown = {"delta": {"content": text}} if "chat" in self.path else {"text": text}
        await self.event({"choices": [{"index": 0, "finish_reason": reason, **shown}]})

    async def finish(self, usage: dict[str, Any] | None) -> None:
        if usage is not None:
            await self.event({"choices": [], "usage": usage})
        await self.chunk(b"data: [DONE]\n\n")
        await self.send(b"0\r\n\r\n")

    async def answer(self) -> None:
        """As a good server does: as many pieces as tokens were asked for."""
        count = self.body["max_tokens"]
        await self.begin()
        await self.chunk(b": keep-alive\n\n")
        for index in range(count):
            await self.piece("word ", "length" if index == count - 1 else None)
        prompt = self.body.get("prompt", "")
        await self.finish({"prompt_tokens": len(prompt), "completion_tokens": count})

    async def refuse(self, status: str, message: str) -> None:
        body = json.dumps({"error": {"message": message}}).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        await self.send(head.encode() + body)


Behaviour = Callable[[Exchange], Awaitable[None]]


@dataclass
class FakeServer:
    url: str
    exchanges: list[Exchange] = field(default_factory=list)


@contextmanager
def fake_server(behave: Behaviour = Exchange.answer) -> Iterator[FakeServer]:
    ready = threading.Event()
    server = FakeServer("")
    handlers: set[asyncio.Task[Any]] = set()
    stop: list[Callable[[], object]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        task.add_done_callback(handlers.discard)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            path = head.split(" ")[1]
            data = await reader.readexactly(int(headers.get("content-length", "0")))
            if path == "/v1/models":
                body = b'{"data": [{"id": "fake"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            else:
                exchange = Exchange(len(server.exchanges), path, headers, json.loads(data), writer)
                server.exchanges.append(exchange)
                await behave(exchange)
            await writer.drain()
        writer.close()

    async def main() -> None:
        over = asyncio.Event()
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as listening:
            server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            stop.append(partial(asyncio.get_running_loop().call_soon_threadsafe, over.set))
            ready.set()
            await over.wait()
            for task in handlers:
                task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        stop[0]()
        thread.join(10)
        assert not thread.is_alive()
