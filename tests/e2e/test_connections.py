"""What clients without a key can make the HTTP process hold, measured on a running server, and the replies it makes
below the application."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Started, need, start, stub_command

CHUNKED = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nx-request-id: mine\r\n\r\n"
SENT = 16 << 20  # bytes over each connection, where it is not closed before
GROWTH = 48 << 20  # bytes the process may need more, whatever comes
ATTACKS = {  # what is sent first, and what follows without end
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n"),
    "one trailer": (CHUNKED + b"0\r\na: ", b"x"),
    "chunk extension": (CHUNKED + b"5;", b"x"),
    "body after its refusal": (b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n", b"x"),
    "requests ahead": (b"", b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
    "bodies ahead": (b"", b"POST /live HTTP/1.1\r\nhost: x\r\ncontent-length: 400\r\n\r\n" + b"x" * 400),
    "blank lines": (b"", b"\r\n"),
    "head": (b"GET / HTTP/1.1\r\nhost: ", b"x"),
}


@pytest.fixture(scope="module")
def keyed(model_here: None) -> Iterator[Started]:
    started = start(stub_command("--api-key", "one", "--max-connections", "64"))
    yield started
    started.stop()


def connect(started: Started) -> socket.socket:
    host, port = started.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    return connection


def peak_memory(started: Started) -> int:
    """The most bytes the HTTP process ever held."""
    status = Path(f"/proc/{started.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10


def send_without_end(connection: socket.socket, more: bytes) -> None:
    """Until the server does not read any more, or `SENT` bytes are out."""
    block = more * ((1 << 18) // len(more))
    connection.settimeout(0.3)
    with suppress(OSError):
        for _ in range(0, SENT, len(block)):
            connection.sendall(block)


@pytest.mark.parametrize("name", ATTACKS)
def test_memory_is_bounded_whatever_comes_without_a_key(keyed: Started, name: str) -> None:
    begun, more = ATTACKS[name]
    before = peak_memory(keyed)
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(keyed)) for _ in range(8)]
        for connection in connections:
            connection.sendall(begun)
        for connection in connections:
            send_without_end(connection, more)
        assert peak_memory(keyed) - before < GROWTH


def test_many_connections_are_bounded_and_leave_room_for_others(keyed: Started) -> None:
    need("httpx")
    import httpx

    before = peak_memory(keyed)
    with ExitStack() as stack:
        for number in range(300):
            connection = stack.enter_context(connect(keyed))
            connection.sendall((CHUNKED + b"5\r\nhel" if number % 2 else b"GET / HTTP/1.1\r\nh: ") + b"x" * 30_000)
        assert httpx.get(keyed.url + "/healthz", timeout=30).status_code == 200
        assert len(list(Path(f"/proc/{keyed.process.pid}/fd").iterdir())) < 64 + 100
        assert peak_memory(keyed) - before < GROWTH


def head_and_body(reply: bytes) -> tuple[bytes, Any]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return head, json.loads(body)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_replies_below_the_application_have_an_id_and_a_dialect(keyed: Started) -> None:
    for sent, status, code in (
        (b"nonsense\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\nhost: " + b"x" * 100_000, 431, "headers_too_large"),
        (CHUNKED + b"zz\r\n", 400, "malformed_request"),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * 1000, 431, "headers_too_large"),
    ):
        with connect(keyed) as connection:
            connection.sendall(sent)
            head, body = head_and_body(read_all(connection))
            if sent.startswith(CHUNKED) and b" 401 " in head:  # the gate was faster: there is no key
                continue
            assert head.startswith(b"HTTP/1.1 %d" % status) and b"connection: close" in head
            assert body["error"]["code"] == code and b"\r\nx-request-id: " in head


def test_the_reply_to_a_body_that_was_not_read_arrives_and_ends_the_connection(keyed: Started) -> None:
    with connect(keyed) as connection:
        connection.sendall(CHUNKED + b"5\r\nhello\r\n")
        head, body = head_and_body(read_all(connection))
        assert head.startswith(b"HTTP/1.1 401") and b"connection: close" in head and body["type"] == "error"
        assert b"x-request-id: mine" in head and b"request-id: mine" in head
