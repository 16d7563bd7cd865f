"""How much the HTTP process costs: tokens per second of its own CPU time, with an engine that emits tokens at once.

Run it by hand, `python -m tests.e2e.test_overhead`, or as the slow test below. CPU time is counted, not the clock, so
that a busy machine gives the same figure. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import KEY, ROOT, Started, start, stub_command
from tests.e2e.test_operation import client_of, until

NUM_STREAMS = 64
NUM_TOKENS = 400
FLOOR = 10_000  # tokens per second on one core


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def one_stream(host: str, port: int, path: str, body: dict[str, Any]) -> int:
    """The number of events that carry a token."""
    reader, writer = await asyncio.open_connection(host, port)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    writer.write(f"{head}Authorization: Bearer {KEY}\r\n\r\n".encode() + content)
    count = 0
    tail = b""
    while b"data: [DONE]" not in tail:
        data = await reader.read(1 << 16)
        assert data, "the stream broke off"
        count += data.count(b'"text":"') + data.count(b'"delta":{"content":"')
        tail = (tail + data)[-64:]
    writer.close()
    return count


async def load(url: str, path: str, body: dict[str, Any]) -> int:
    host, _, port = url.removeprefix("http://").partition(":")
    return sum(await asyncio.gather(*(one_stream(host, int(port), path, body) for _ in range(NUM_STREAMS))))


def measure(started: Started) -> dict[str, Any]:
    results = {}
    words = " ".join(["word"] * NUM_TOKENS)
    chat = {"messages": [{"role": "user", "content": words}], "max_tokens": NUM_TOKENS, "stream": True}
    raw = {"prompt": "one two three", "max_tokens": NUM_TOKENS, "stream": True}
    for path, body in (("/v1/completions", raw), ("/v1/chat/completions", chat)):
        asyncio.run(load(started.url, path, {**body, "max_tokens": 5}))  # first use costs more
        before, clock = cpu_seconds(started.process.pid), time.monotonic()
        num_events = asyncio.run(load(started.url, path, body))
        used = cpu_seconds(started.process.pid) - before
        num_tokens = NUM_STREAMS * NUM_TOKENS
        results[path] = {
            "tokens": num_tokens,
            "events": num_events,
            "cpu_seconds": round(used, 3),
            "tokens_per_cpu_second": round(num_tokens / used),
            "tokens_per_second": round(num_tokens / (time.monotonic() - clock)),
        }
    return results


@pytest.mark.slow
def test_the_http_process_handles_ten_thousand_tokens_a_second(model_here: None) -> None:
    started = start(stub_command("--log-level", "error"))
    try:
        results = measure(started)
    finally:
        started.stop()
    print(json.dumps(results))
    for result in results.values():
        assert result["events"] >= 0.95 * result["tokens"], "one event for each token"
        assert result["tokens_per_cpu_second"] >= FLOOR, results


NUM_ROWS, NUM_STEPS = 8, 256
MAX_RATIO = 1.05


@pytest.mark.slow
def test_the_engine_is_hardly_slower_behind_a_server(real: Started) -> None:
    """CPU seconds of the engine's process for each step, alone and behind 8 streams, one run after the other."""
    from tests.e2e.direct_engine import PROMPT

    with client_of(real) as client:
        pid = client.get("/admin/engine").json()["pid"]
        ratios = []
        for salt in "abcdefg":
            command = [sys.executable, "-m", "tests.e2e.direct_engine", str(NUM_ROWS), str(NUM_STEPS)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
            alone = json.loads(done.stdout)
            body = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_STEPS, "stream": True, "cache_salt": salt}
            steps, before = client.get("/v1/stats").json()["engine"]["steps"], cpu_seconds(pid)
            asyncio.run(load_rows(real.url, [{**body, "prompt": f"{PROMPT} {index}"} for index in range(NUM_ROWS)]))
            until(lambda: client.get("/v1/stats").json()["engine"]["running"] == 0)
            used, count = cpu_seconds(pid) - before, client.get("/v1/stats").json()["engine"]["steps"] - steps
            ratios.append((used / count) / (alone["cpu_seconds"] / alone["steps"]))
    print(f"ratios {ratios}")
    assert sorted(ratios)[len(ratios) // 2] < MAX_RATIO, ratios


async def load_rows(url: str, bodies: list[dict[str, Any]]) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    await asyncio.gather(*(one_stream(host, int(port), "/v1/completions", body) for body in bodies))


if __name__ == "__main__":
    server = start(stub_command("--log-level", "error"))
    try:
        json.dump(measure(server), sys.stdout, indent=2)
    finally:
        server.stop()
