"""The hostile benchmark without a server: whole requests, attacks that count what they meet, figures that add up."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from subprocess import PIPE

import pytest

from quire.bench.hostile.attacks import KINDS, Ask, Crowd, Drip, Flood, Tally, make_attacks, run_attacks
from quire.bench.hostile.requests import (
    REQUEST_KINDS,
    SMALL,
    TEMPLATE_COSTS,
    Exchange,
    Target,
    costly_template,
    post,
)
from quire.bench.hostile.watch import MemoryWatch, quantile, read_histograms, subtract
from quire.server.http.bodies import decode_json, validate_body

TARGET = Target("127.0.0.1", 1, "sk")
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

METRICS = """
quire_http_loop_delay_seconds_bucket{le="0.001"} 50.0
quire_http_loop_delay_seconds_bucket{le="0.01"} 90.0
quire_http_loop_delay_seconds_bucket{le="0.1"} 100.0
quire_http_loop_delay_seconds_bucket{le="+Inf"} 100.0
quire_http_seconds_bucket{le="0.1",route="/x"} 7.0
"""


@pytest.mark.parametrize("kind", REQUEST_KINDS)
def test_every_request_is_whole_and_small_ones_are_small(kind: str) -> None:
    for exchange in REQUEST_KINDS[kind](TARGET, SMALL):
        head, _, body = exchange.data.partition(b"\r\n\r\n")
        assert len(exchange.data) < 1 << 20 and exchange.expected, exchange.name
        if head.startswith(b"POST"):
            assert f"Content-Length: {len(body)}".encode() in head, exchange.name


def test_requests_that_may_be_answered_are_refused_by_no_schema() -> None:
    """A misspelt field would be refused before it costs anything, and the attack would be none."""
    for exchange in (one for make in REQUEST_KINDS.values() for one in make(TARGET, SMALL) if 200 in one.expected):
        head, _, body = exchange.data.partition(b"\r\n\r\n")
        validate_body(head.split()[1].decode(), decode_json(body))


def test_every_kind_has_attacks() -> None:
    assert tuple(make_attacks(TARGET, SMALL, 1.0, 1 << 20, 8)) == KINDS


def test_a_template_costs_only_if_a_message_asks() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment().from_string(costly_template("own {{ messages[0].content }}"))
    assert template.render(messages=[{"content": "hello"}]) == "own hello"
    assert all(f"cost:{name}" in costly_template("") for name in TEMPLATE_COSTS)


def test_quantiles_of_what_came_between_two_readings() -> None:
    histogram = read_histograms(METRICS)["quire_http_loop_delay"]
    assert len(read_histograms(METRICS)) == 1 and quantile(histogram, 0.5) == pytest.approx(0.001)
    assert quantile(histogram, 0.95) == pytest.approx(0.055) and quantile(histogram, 1.0) == 0.1
    assert quantile(subtract(histogram, histogram), 0.5) is None and quantile([], 0.5) is None
    assert quantile([(0.1, 0.0), (float("inf"), 3.0)], 1.0) == 0.1, "more than the largest bound has no better figure"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_memory_is_read_from_outside() -> None:
    """Of another process: this one's may fall meanwhile, as earlier tests' memory is given back."""
    code = "import sys; print(flush=True); input(); block = bytearray(b'1' * (64 << 20)); print(flush=True); input()"

    async def watch() -> int:
        with subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE) as child:
            assert child.stdin is not None and child.stdout is not None
            child.stdout.readline()
            watched = MemoryWatch(child.pid, 1)
            watched.begin()
            child.stdin.write(b"\n")
            child.stdin.flush()
            child.stdout.readline()
            memory = await watched.end()
            child.stdin.write(b"\n")
            child.stdin.close()
        return memory.peak - memory.before

    assert asyncio.run(watch()) >= 60 << 20


def against(serve: Serve, attack: Callable[[Target, Tally], Awaitable[None]]) -> Tally:
    async def run() -> Tally:
        tally = Tally()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve(reader, writer)
            except ConnectionError:
                pass
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            await attack(Target("127.0.0.1", server.sockets[0].getsockname()[1], "sk"), tally)
        return tally

    return asyncio.run(run())


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 16):
        pass


async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)


def test_an_answer_is_right_or_wrong_by_its_status() -> None:
    request = post(TARGET, "/v1/chat/completions", b"{}")
    asked = Ask([Exchange("right", request), Exchange("wrong", request, frozenset({413}))])

    async def attack(target: Target, tally: Tally) -> None:
        await asked.once(target, tally)
        await asked.once(target, tally)

    tally = against(refuse, attack)
    assert tally.answers == {"400": 2} and tally.wrong == {"wrong: 400": 1} and tally.sent_bytes == 2 * len(request)
    assert against(cut, attack).answers == {"cut": 2}


def test_a_flood_that_is_taken_is_a_wrong_answer_and_one_that_is_cut_is_not() -> None:
    flood = Flood("flood", lambda _: b"", b"x", 8 << 20)
    flood.wait = 0.0
    assert against(swallow, flood.once).wrong == {"flood: took all": 1}
    flood.wait = 5.0
    tally = against(cut, flood.once)
    assert tally.answers == {"cut": 1} and not tally.wrong


def test_connections_that_are_held_are_counted() -> None:
    assert against(swallow, Crowd(5, 0.0).once).answers == {"held": 5}
    assert against(swallow, Drip(lambda _: b"x", 3, 0.0).once).answers == {"held": 3}
    assert against(cut, Drip(lambda _: b"x", 3, 5.0).once).answers == {"closed": 3}


def test_everything_is_sent_although_the_time_is_over() -> None:
    asked = Ask([Exchange(str(place), post(TARGET, "/x", b"")) for place in range(7)])

    async def attack(target: Target, tally: Tally) -> None:
        tallies = await run_attacks(target, {"a": [asked, asked]}, 0.0, 100)
        tally.add(tallies["a"])

    tally = against(refuse, attack)
    assert sum(tally.answers.values()) >= 7, json.dumps(tally.answers)


def test_a_server_that_is_gone_is_a_wrong_answer() -> None:
    async def attack() -> Tally:
        asked = Ask([Exchange("x", post(TARGET, "/x", b""))])
        return (await run_attacks(TARGET, {"a": [asked]}, 0.0, 1))["a"]

    assert sum(asyncio.run(attack()).wrong.values()) == 1
