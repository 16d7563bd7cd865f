"""Attacks on an HTTP server, with counts of the bytes sent and of the answers.

`quire bench hostile` runs them in a separate process (`sender`), the chaos gate in its own. Every attack is limited in
time, connections, and bytes per connection.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from quire.bench.hostile.requests import CHAT, CUT, OVERLOADED, REQUEST_KINDS, Exchange, Sizes, Target, post

ANSWER_SECONDS = 120.0  # seconds; a later answer counts as wrong
PIECE = 1 << 16
MAX_CONCURRENT = 3  # concurrent requests of one kind


@dataclass(slots=True)
class Tally:
    """Counts of one attack."""

    sent_bytes: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)  # answers that a correct server does not give

    def count(self, name: str, status: int | str, expected: bool) -> None:
        shown = "cut" if status == CUT else str(status)
        _add(self.answers, {shown: 1})
        if not expected:
            _add(self.wrong, {f"{name}: {shown}": 1})

    def add(self, other: Tally) -> None:
        self.sent_bytes += other.sent_bytes
        _add(self.answers, other.answers)
        _add(self.wrong, other.wrong)


def _add(counts: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


class Attack(Protocol):
    unsent: int  # calls of `once` until each request has been sent once, even beyond the time limit

    async def once(self, target: Target, tally: Tally) -> None: ...


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connect(target: Target) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=PIECE)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Read an answer to its end and return its status, or CUT if there was none."""
    status = CUT
    with suppress(ConnectionError):
        line = await reader.readline()
        if line.startswith(b"HTTP/1.1 "):
            status = int(line[9:12])
        while await reader.read(PIECE):
            pass
    return status


class Ask:
    """Sends complete requests and reads their answers."""

    def __init__(self, exchanges: list[Exchange]):
        self._next = itertools.cycle(exchanges)
        self.unsent = len(exchanges)

    async def once(self, target: Target, tally: Tally) -> None:
        exchange = next(self._next)
        self.unsent -= 1
        status: int | str
        try:
            async with asyncio.timeout(ANSWER_SECONDS), connect(target) as (reader, writer):
                writer.write(exchange.data)
                tally.sent_bytes += len(exchange.data)
                status = await read_answer(reader)
        except TimeoutError:
            status = "no answer"
        tally.count(exchange.name, status, status in exchange.expected or status in OVERLOADED)


class Flood:
    """Sends bytes on one connection until the server closes it or `cap` bytes are sent. The server may discard them,
    but must close the connection unless it `may_take` everything."""

    unsent = 0
    wait = 5.0  # seconds for the server to close the connection after the last byte

    def __init__(self, name: str, start: Callable[[Target], bytes], piece: bytes, cap: int, may_take: bool = False):
        self._name, self._start, self._cap, self._may_take = name, start, cap, may_take
        self._piece = piece * (PIECE // len(piece))

    async def once(self, target: Target, tally: Tally) -> None:
        status, ended = CUT, False
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS), connect(target) as (reader, writer):
                answer = asyncio.create_task(read_answer(reader))
                try:
                    tally.sent_bytes += await self._pour(target, writer, answer)
                    ended = bool((await asyncio.wait((answer,), timeout=self.wait))[0])
                    status = answer.result() if ended else CUT
                finally:
                    answer.cancel()
        tally.count(self._name, status if ended else "took all", ended or self._may_take)

    async def _pour(self, target: Target, writer: asyncio.StreamWriter, answer: asyncio.Task[int]) -> int:
        sent = 0
        with suppress(ConnectionError):
            writer.write(self._start(target))
            while sent < self._cap and not answer.done() and not writer.is_closing():
                writer.write(self._piece)
                await writer.drain()
                sent += len(self._piece)
        return sent


class Drip:
    """Opens connections that send the start of a request and then single bytes at intervals."""

    unsent = 0

    def __init__(self, start: Callable[[Target], bytes], connections: int, seconds: float, every: float = 0.5):
        self._start, self._connections, self._seconds, self._every = start, connections, seconds, every

    async def once(self, target: Target, tally: Tally) -> None:
        await asyncio.gather(*(self._one(target, tally) for _ in range(self._connections)))

    async def _one(self, target: Target, tally: Tally) -> None:
        end, held = asyncio.get_running_loop().time() + self._seconds, True
        with suppress(ConnectionError, OSError):
            async with connect(target) as (reader, writer):
                writer.write(self._start(target))
                while asyncio.get_running_loop().time() < end and held:
                    writer.write(b"a")
                    tally.sent_bytes += 1
                    await writer.drain()
                    with suppress(TimeoutError):
                        held = bool(await asyncio.wait_for(reader.read(PIECE), self._every))
        tally.count("drip", "held" if held else "closed", True)


class Crowd:
    """Opens connections that send nothing."""

    unsent = 0

    def __init__(self, connections: int, seconds: float):
        self._connections, self._seconds = connections, seconds

    async def once(self, target: Target, tally: Tally) -> None:
        opened: list[Streams] = []
        try:
            for _ in range(self._connections):
                try:
                    opened.append(await asyncio.open_connection(target.host, target.port))
                except OSError:
                    tally.count("idle", "refused", True)
            await asyncio.sleep(self._seconds)
        finally:
            for reader, writer in opened:
                tally.count("idle", "closed" if reader.at_eof() else "held", True)
                writer.transport.abort()


class Pipeline:
    """Sends pipelined requests on one connection, whose answers are read at once or after a pause."""

    unsent = 0

    def __init__(self, requests: Callable[[Target], bytes], reads: bool):
        self._requests, self._reads = requests, reads

    async def once(self, target: Target, tally: Tally) -> None:
        data, size = self._requests(target), 0
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(10), connect(target) as (reader, writer):
                writer.write(data)
                tally.sent_bytes += len(data)
                if not self._reads:
                    await asyncio.sleep(2)
                while part := await reader.read(PIECE):
                    size += len(part)
        tally.count("pipelined", "answered" if size else "cut", True)


# ---------------------------------------------------------------------------------------------------------------------
# Kinds of attacks


def _trailers(target: Target) -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n0\r\n"
    ).encode()


def _chunks(target: Target) -> bytes:
    """Chunks of one byte with long extensions: many bytes for a short body."""
    return _trailers(target).removesuffix(b"0\r\n")


def _refused_body(target: Target) -> bytes:
    """A body that continues after its request was refused for a missing API key."""
    head = post(target, CHAT, b"", key=False).replace(b"Connection: close\r\n", b"")
    return head.replace(b"Content-Length: 0", b"Content-Length: 900000000")


def _dripped_body(target: Target) -> bytes:
    return post(target, CHAT, b"x" * 100_000).partition(b"x")[0]


def _slow_head(target: Target) -> bytes:
    return f"POST {CHAT} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nx-slow: ".encode()


def _gets(count: int) -> Callable[[Target], bytes]:
    def requests(target: Target) -> bytes:
        return f"GET /healthz HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n\r\n".encode() * count

    return requests


def _posts(count: int) -> Callable[[Target], bytes]:
    def requests(target: Target) -> bytes:
        return post(target, CHAT, b'{"messages":1}').replace(b"Connection: close\r\n", b"") * count

    return requests


def make_attacks(
    target: Target, sizes: Sizes, seconds: float, flood_bytes: int, connections: int
) -> dict[str, list[Attack]]:
    """Return all kinds of attacks by name; the attacks of one kind run concurrently."""
    attacks: dict[str, list[Attack]] = {
        "trailers": [Flood("trailers", _trailers, b"a: b\r\n", flood_bytes)],
        "chunks": [
            Flood("chunk extensions", _chunks, b"1;" + b"e" * 250 + b"\r\nx\r\n", 2 * flood_bytes, True),
            Flood("a refused body", _refused_body, b"x", 2 * flood_bytes),
        ],
        **{name: [Ask(make(target, sizes))] * MAX_CONCURRENT for name, make in REQUEST_KINDS.items()},
        "drips": [Drip(_dripped_body, connections // 4, seconds), Drip(_slow_head, connections // 4, seconds)],
        "idle": [Crowd(connections, seconds)],
        "pipeline": [
            Pipeline(_gets(sizes.pipelined), True),
            Pipeline(_posts(sizes.pipelined), True),
            Pipeline(_gets(sizes.pipelined * 20), False),
        ],
    }
    return attacks


KINDS = ("trailers", "chunks", *REQUEST_KINDS, "drips", "idle", "pipeline")


async def run_attacks(
    target: Target, attacks: dict[str, list[Attack]], seconds: float, max_rounds: int
) -> dict[str, Tally]:
    """Repeat each attack until the time is over and all its requests were sent, at most `max_rounds` times."""
    tallies = {name: Tally() for name in attacks}
    end = asyncio.get_running_loop().time() + seconds

    async def repeat(attack: Attack, tally: Tally) -> None:
        for _ in range(max_rounds):
            try:
                await attack.once(target, tally)
            except OSError as error:
                tally.count(type(attack).__name__.lower(), f"no connection ({error.strerror or error})", False)
                await asyncio.sleep(0.2)
            if asyncio.get_running_loop().time() >= end and attack.unsent <= 0:
                return

    await asyncio.gather(*(repeat(attack, tallies[name]) for name, several in attacks.items() for attack in several))
    return tallies
