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


def cpu_nanoseconds(pid: int) -> int:
    """Of all threads that live now; finer than `cpu_seconds`, whose unit is a hundredth of a second."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


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


NUM_ROWS, NUM_STEPS, NUM_PAIRS = 8, 64, 40
MAX_RATIO = 1.05


@pytest.mark.slow
def test_the_engine_is_hardly_slower_behind_a_server(real: Started) -> None:
    """CPU seconds of the engine's process for each step, alone and behind 8 streams, in turns of two seconds or so.

    Both engines run on the first core and everyone else on the others: this is about the engine's own loop, and a
    process that is pushed off its core finds its cache cold when it is back. Turns are short because what else runs
    on the machine makes the same step cost several percent more or less from one minute to the next.
    """
    from tests.e2e.direct_engine import PROMPT

    cores = os.sched_getaffinity(0)
    first, others = min(cores), cores - {min(cores)} or cores
    body = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_STEPS, "stream": True}
    command = [sys.executable, "-m", "tests.e2e.direct_engine", str(NUM_ROWS), str(NUM_STEPS), str(first)]
    direct = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert direct.stdin is not None and direct.stdout is not None
    ratios = []
    with direct, client_of(real) as client:
        pid = client.get("/admin/engine").json()["pid"]
        for process, its_cores in ((pid, {first}), (real.process.pid, others), (os.getpid(), others)):
            pin(process, its_cores)
        for turn in range(NUM_PAIRS + 1):
            direct.stdin.write(f"{turn}\n")
            direct.stdin.flush()
            alone = json.loads(direct.stdout.readline())
            steps, before = client.get("/v1/stats").json()["engine"]["steps"], cpu_nanoseconds(pid)
            prompts = [f"{PROMPT} {index}" for index in range(NUM_ROWS)]
            asyncio.run(load_rows(real.url, [{**body, "prompt": text, "cache_salt": str(turn)} for text in prompts]))
            until(lambda: client.get("/v1/stats").json()["engine"]["running"] == 0)
            used = (cpu_nanoseconds(pid) - before) / 1e9
            count = client.get("/v1/stats").json()["engine"]["steps"] - steps
            ratios.append((used / count) / (alone["cpu_seconds"] / alone["steps"]))
        direct.stdin.close()
    pin(os.getpid(), cores)
    ratios = sorted(ratios[1:])  # the first turn warms both up
    low, middle, high = (ratios[NUM_PAIRS * quarter // 4] for quarter in (1, 2, 3))
    print(f"ratio {middle:.3f}, half of {NUM_PAIRS} pairs between {low:.3f} and {high:.3f}")
    assert middle < MAX_RATIO, ratios


def pin(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


async def load_rows(url: str, bodies: list[dict[str, Any]]) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    await asyncio.gather(*(one_stream(host, int(port), "/v1/completions", body) for body in bodies))


if __name__ == "__main__":
    server = start(stub_command("--log-level", "error"))
    try:
        json.dump(measure(server), sys.stdout, indent=2)
    finally:
        server.stop()
