"""A thousand requests, a third of whose clients hang up midway: nothing leaks and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from tests.e2e.conftest import ADMIN_KEY, KEY, Started
from tests.e2e.test_operation import client_of, engine, is_idle, until

NUM_REQUESTS = 1000
MAX_OPEN = 48
MAX_GROWTH = 24 << 20  # bytes; a leak of one request's state each would be several times that


async def one(url: str, body: dict[str, Any], leave_after: int | None) -> bool:
    """Did the client get everything? One that leaves reads so many bytes and slams the door."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + content)
    try:
        if leave_after is not None:
            await reader.read(leave_after)
            writer.transport.abort()
            return False
        reply = await reader.read(-1)
    finally:
        writer.close()
    ended = b'"finish_reason":"length"' in reply
    return ended and reply.startswith(b"HTTP/1.1 200") and (b"[DONE]" in reply) == body["stream"]


async def storm(url: str, count: int, rng: random.Random) -> tuple[int, int, int]:
    """How many got everything, how many stayed, and how many of the others did not wait for a first byte: the end of
    such a connection may overtake what it brought, and then there never was a request."""
    gate = asyncio.Semaphore(MAX_OPEN)
    hasty: set[int] = set()

    async def client(number: int) -> bool:
        leaves = number % 3 == 0
        stream = rng.random() < 0.7
        words = " ".join(rng.choice(["red", "green", "blue"]) for _ in range(rng.randrange(2, 60)))
        body = {"prompt": words, "max_tokens": 400 if leaves else rng.randrange(2, 24), "stream": stream,
                "ignore_eos": True}  # fmt: skip
        after = None if not leaves else rng.randrange(1, 600) if stream else 0
        if after == 0:
            hasty.add(number)
        async with gate:
            return await one(url, body, after)

    done = await asyncio.gather(*map(client, range(count)))
    stayed = sum(number % 3 != 0 for number in range(count))
    return sum(done), stayed, len(hasty)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_third_hangs_up(tiny: Started) -> None:
    """The whole thing: the real engine process, whose every page must come back."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with client_of(tiny) as client:
        admin = {"authorization": f"Bearer {ADMIN_KEY}"}
        pids = [tiny.process.pid, client.get("/admin/engine", headers=admin).json()["pid"]]
        asyncio.run(storm(tiny.url, 200, rng))  # buffers and caches find their size
        # Who left at once may be on the way to the engine still: it has them when one who came later has ended.
        client.post("/v1/completions", json={"prompt": "red", "max_tokens": 1})
        client.post("/admin/check", headers=admin)  # answered after the beat that counts it
        until(lambda: is_idle(client))
        before, ended = [resident(pid) for pid in pids], engine(client)["ended"]
        completed, stayed, hasty = asyncio.run(storm(tiny.url, NUM_REQUESTS, rng))
        assert completed == stayed, "everyone who stayed got the whole answer"
        until(lambda: is_idle(client))
        stats = client.get("/v1/stats").json()
        assert stats["http"]["live"] == 0 and stats["engine"]["held"] == 0
        begun = stats["engine"]["ended"] - ended
        assert NUM_REQUESTS - hasty <= begun <= NUM_REQUESTS, "each that was begun came to an end"
        growth = [after - start for after, start in zip([resident(pid) for pid in pids], before, strict=True)]
        assert all(grown < MAX_GROWTH for grown in growth), growth
        text = client.get("/metrics").text
        left = [float(line.split()[1]) for line in text.splitlines() if line.startswith("quire_disconnects_total{")]
        assert sum(left) >= NUM_REQUESTS // 6, "clients did leave"
