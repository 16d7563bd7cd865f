"""What a connection takes and holds: whatever is slow or without end is cut off or refused, all else passes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

import uvicorn

from quire.server.http import connection
from quire.server.http.errors import ApiError
from quire.server.http.open_connections import OpenConnections

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


def with_client(play: Play, app: Any = echo, others: OpenConnections | None = None) -> None:
    others = OpenConnections(100) if others is None else others

    async def run() -> None:
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        state = uvicorn.server.ServerState()
        make = lambda: connection.ServerConnection(  # noqa: E731
            config=config, server_state=state, app_state={}, others=others
        )
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


# -- what follows a head


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answers without reading the body, as the gate does without a key."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def swallow(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await refuse(scope, receive, send)


async def never(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.Event().wait()


CHUNKED = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nx-request-id: mine\r\n\r\n"
AFTER_HEAD = {
    "trailers": CHUNKED + b"5\r\nhello\r\n0\r\n" + b"a: b\r\n" * 20_000,
    "one trailer": CHUNKED + b"5\r\nhello\r\n0\r\na: " + b"b" * 80_000,
    "name of a trailer": CHUNKED + b"0\r\n" + b"b" * 80_000,
    "extension": CHUNKED + b"5;a=" + b"b" * 80_000,
    "extensions": CHUNKED + b"1;aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\nh\r\n" * 3000,
    "chunks of a byte": CHUNKED + b"1\r\nh\r\n" * 20_000,
    "size": CHUNKED + b"0" * 80_000,
}


@pytest.mark.parametrize("name", AFTER_HEAD)
def test_what_surrounds_a_body_has_bounds(name: str) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(AFTER_HEAD[name])
        reply = await reader.read(-1)
        head, _, body = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431") and b"x-request-id: mine" in head and b"connection: close" in head
        error = json.loads(body)
        assert error["type"] == "error" and error["error"]["code"] == "headers_too_large", "in the route's dialect"
        assert others.num_held == 0

    others = OpenConnections(100)
    with_client(play, others=others)


def test_small_chunks_with_few_trailers_pass_and_trailers_add_no_headers() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        seen.extend(scope["headers"])

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(CHUNKED + b"".join(b"1;n=%d\r\n%c\r\n" % (n, c) for n, c in enumerate(b"hello")))
            writer.write(b"0\r\nauthorization: Bearer other\r\n\r\n")
            assert await answered(reader) == b"hello"
        assert b"authorization" not in dict(seen) and b"host" in dict(seen)

    with_client(play, app)


@pytest.mark.parametrize("begun", [HEAD + b"\r\nhel", CHUNKED, CHUNKED + b"5\r\nhello\r\n0\r\na: b"])
def test_a_reply_to_a_body_that_was_not_read_ends_the_connection(begun: bytes) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        reply = await reader.read(-1)  # to its end: the server ends it, the client has not
        assert reply.startswith(b"HTTP/1.1 401") and reply.endswith(b"hello") and b"connection: close" in reply
        with suppress(ConnectionError):  # what comes now is thrown away, and is no request
            writer.write(HEAD + b"\r\nhello")
            await writer.drain()

    with_client(play, refuse)


def test_a_reply_to_a_body_that_came_whole_leaves_the_connection_open() -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            writer.write(HEAD + b"\r\nhello")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 401") and b"connection: close" not in head
            assert await reader.readexactly(5) == b"hello"

    with_client(play, refuse)


def test_few_requests_may_come_before_their_turn() -> None:
    go = asyncio.Event()
    calls: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope["path"])
        await go.wait()
        await refuse(scope, receive, send)

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(3000):
            writer.write(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number)
        await writer.drain()
        while not calls:
            await asyncio.sleep(0)
        go.set()
        replies = await reader.read(-1)
        assert calls == [f"/{number}" for number in range(connection.MAX_AHEAD + 1)], "those are answered, in order"
        assert replies.count(b"HTTP/1.1 401") == len(calls) and replies.count(b"connection: close") == 1

    with_client(play, app)


@pytest.mark.parametrize("fields", [connection.MAX_FIELDS - 3, connection.MAX_FIELDS + 1])
def test_fields_are_counted(fields: int) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"a:\r\n" * fields + b"\r\nhello")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431" if fields > connection.MAX_FIELDS else b"HTTP/1.1 200")

    with_client(play)


# -- replies of our own


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", CHUNKED + b"zz\r\n", b"GET / HTTP/9.9\r\n\r\n"])
def test_malformed_requests_get_an_error_with_an_id(sent: bytes) -> None:
    said: list[tuple[str, ApiError]] = []

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "malformed_request"
        name = re.search(rb"\r\nx-request-id: ([\w.-]+)", head)
        assert name is not None and said[0][0].encode() == name[1] and len(said) == 1
        assert (name[1] == b"mine") == (sent[:4] == b"POST")

    with_client(play, others=OpenConnections(9, report=lambda *args: said.append(args)))


async def fail(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("a bug of ours")


async def nothing(scope: Any, receive: Any, send: Any) -> None: ...


@pytest.mark.parametrize("app", [fail, nothing], ids=lambda app: app.__name__)
def test_an_application_that_ends_without_a_reply_gets_one_with_an_id(app: Any) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\n\r\n")
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 500") and b"\r\nx-request-id: mine" in head
        assert json.loads(body)["error"]["code"] == "internal_error" and b"a bug" not in body

    with_client(play, app)


@pytest.mark.parametrize("second", [b"nonsense\r\n\r\n", CHUNKED + b"zz\r\n"])
def test_an_error_waits_for_the_replies_before_it(second: bytes) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        begun.set()
        await go.wait()
        await send({"type": "http.response.body", "body": b"later"})

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + second)
        await begun.wait()
        go.set()
        whole, _, rest = (await reader.read(-1)).partition(b"firstlater")
        assert whole.startswith(b"HTTP/1.1 200") and rest.startswith(b"HTTP/1.1 400"), whole + rest

    with_client(play, app)


def test_a_client_that_leaves_is_noticed_though_it_sent_more_requests() -> None:
    left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((HEAD + b"\r\nhello") * 2)
        await writer.drain()
        writer.transport.abort()
        await left.wait()

    with_client(play, app)


# -- all connections together


def test_the_number_of_connections_has_a_bound_and_those_without_a_request_go_first() -> None:
    busy: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        busy.append(scope["path"])
        await never(scope, receive, send)

    async def play(first: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("peername")
        second, other = await asyncio.open_connection(*address)
        other.write(HEAD[:20])
        _, working = await asyncio.open_connection(*address)
        assert await first.read(-1) == b"", "it waited longest"
        working.write(b"GET /third HTTP/1.1\r\n\r\n")
        _, also = await asyncio.open_connection(*address)
        with suppress(ConnectionError):
            assert await second.read(-1) == b"", "half a head is no request"
        also.write(b"GET /fourth HTTP/1.1\r\n\r\n")
        while len(busy) < 2:
            await asyncio.sleep(0)
        fifth, none = await asyncio.open_connection(*address)
        reply = await fifth.read(-1)
        assert reply.startswith(b"HTTP/1.1 503") and b"\r\nx-request-id: req_" in reply and len(others) == 2
        for end in (other, working, also, none):
            end.close()

    others = OpenConnections(2)
    with_client(play, app, others)


def test_all_connections_hold_so_much_together() -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"a: " + b"b" * 50_000)
        while others.num_held < 50_000:
            await asyncio.sleep(0)
        second, other = await asyncio.open_connection(*writer.get_extra_info("peername"))
        other.write(HEAD + b"a: " + b"b" * 60_000)
        assert (await second.read(-1)).startswith(b"HTTP/1.1 503")
        writer.write(b"\r\n\r\nhello")
        assert await answered(reader) == b"hello", "which came first is served"
        other.close()
        while len(others) > 1:
            await asyncio.sleep(0)
        assert others.num_held == 0

    others = OpenConnections(100, max_held=100_000)
    with_client(play, others=others)


# -- whatever the state of the parser

ENDLESS = {
    "url": (b"GET /", b"x" * 997),
    "field": (b"GET / HTTP/1.1\r\nh", b"x" * 997),
    "value": (b"GET / HTTP/1.1\r\nhost: ", b"x" * 997),
    "fields": (b"GET / HTTP/1.1\r\n", b"a:\r\n" * 250),
    "blank lines": (b"", b"\r\n" * 500),
    "blank lines between": (b"GET / HTTP/1.1\r\n\r\n", b"\r\n" * 500),
    "heads ahead": (b"", b"GET / HTTP/1.1\r\n\r\n" * 50),
    "large heads ahead": (b"", b"GET / HTTP/1.1\r\nh: " + b"x" * 16_000 + b"\r\n\r\n"),
    "bodies ahead": (b"", b"POST / HTTP/1.1\r\ncontent-length: 900\r\n\r\n" + b"x" * 900),
    "body": (b"POST / HTTP/1.1\r\ncontent-length: 999999999\r\n\r\n", b"x" * 997),
    "chunks": (CHUNKED, b"1\r\nx\r\n" * 200),
    "size": (CHUNKED, b"0" * 997),
    "extension": (CHUNKED + b"1;", b"x" * 997),
    "extensions": (CHUNKED, (b"1;" + b"x" * 300 + b"\r\nx\r\n") * 3),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * 150),
    "trailer": (CHUNKED + b"0\r\na: ", b"x" * 997),
    "upgrade": (b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", b"x" * 997),
    "connect": (b"CONNECT x:1 HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n" * 50),
    "nonsense": (b"", bytes(range(250)) * 4),
}


class Wire(asyncio.Transport):
    """A client that sends as long as the server reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.open, self.num_written = True, True, 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return not self.open

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: Any) -> None:
        self.num_written += len(data)

    def write_eof(self) -> None: ...

    def close(self) -> None:
        self.open = False

    abort = close


@pytest.mark.parametrize("app", [swallow, refuse, never], ids=lambda app: app.__name__)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_connection_holds_little_whatever_is_sent_without_end(name: str, app: Any) -> None:
    """Measured: bytes allocated while 4 MiB are sent, in reads as large as the loop's."""
    begun, more = ENDLESS[name]
    read = (more * (1 + (256 << 10) // len(more)))[: (256 << 10) // len(more) * len(more)]

    async def run() -> int:
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        others, wire = OpenConnections(9), Wire()
        one = connection.ServerConnection(
            config=config, server_state=uvicorn.server.ServerState(), app_state={}, others=others
        )
        one.connection_made(wire)
        one.data_received(begun)
        del config
        tracemalloc.start()
        sent = 0
        try:
            while sent < 4 << 20 and wire.open and wire.reading:
                one.data_received(read)
                sent += len(read)
                for _ in range(5):
                    await asyncio.sleep(0)
                assert others.num_held <= (64 << 10) + connection.MAX_HEAD + 2 * len(read)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            one.connection_lost(None)
        assert others.num_held == 0 and not len(others)
        for task in one.tasks:
            task.cancel()
        return peak

    assert asyncio.run(run()) < 8 * len(read)


# -- the port


def test_a_port_is_taken_as_soon_as_it_is_bound() -> None:
    """Two servers may bind one port where neither listens, and would find out after loading their models."""
    import socket

    from quire.server.run import bind
    from quire.types import QuireError

    first = bind("127.0.0.1", 0)
    try:
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        with pytest.raises(QuireError, match=f"port {first.getsockname()[1]}: Address already in use") as caught:
            bind("127.0.0.1", first.getsockname()[1])
        assert caught.value.code == "address_in_use"
    finally:
        first.close()


def test_requests_in_random_pieces_are_all_answered_in_order() -> None:
    """What the bounds must not touch: bodies of every form, on one connection, some of them sent before their turn."""
    seed = int(os.environ.get("TEST_SEED", random.randrange(1 << 32)))
    print(f"TEST_SEED={seed}")
    rng = random.Random(seed)

    def request(size: int) -> bytes:
        body = rng.randbytes(size)
        head = b"POST / HTTP/1.1\r\nhost: x\r\n"
        if rng.random() < 0.5:
            return head + b"content-length: %d\r\n\r\n" % size + body
        sent = head + b"transfer-encoding: chunked\r\n\r\n"
        while body:
            count = rng.choice((1, 100, 5000, 70_000))
            extension = rng.choice((b"", b";a=b"))
            sent += b"%x%s\r\n" % (len(body[:count]), extension) + body[:count] + b"\r\n"
            body = body[count:] if count > 1 or len(body) < 100 else body[1:][:99]
        return sent + b"0\r\n" + rng.choice((b"", b"checksum: 1\r\n")) + b"\r\n"

    async def size(scope: Any, receive: Any, send: Any) -> None:
        count, more = 0, True
        while more:
            message = await receive()
            count, more = count + len(message["body"]), message["more_body"]
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        body = b"%06d" % count
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
        await send({"type": "http.response.body", "body": body})

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(30):
            batch = [request(rng.choice((0, 1, 50, 3000, 200_000))) for _ in range(rng.randrange(1, 5))]
            data = b"".join(batch)
            while data:
                count = rng.choice((1, 7, 4096, 300_000)) if len(data) < 2000 else 300_000
                writer.write(data[:count])
                data = data[count:]
                await asyncio.sleep(0)
            for _ in batch:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200") and b"close" not in head
                await reader.readexactly(6)
        assert others.num_held == 0

    others = OpenConnections(9)
    with_client(play, size, others)
