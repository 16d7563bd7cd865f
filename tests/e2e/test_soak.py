"""Twenty thousand short requests through a server with a made-up model: neither process may grow. Takes minutes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.bench.online.stream_client import Endpoint, parse_url
from quire.bench.online.streamed_chat import send_request
from quire.files.tiny_model import make_tiny_model
from tests.e2e.conftest import start

TOTAL = int(os.environ.get("SOAK_REQUESTS", "20000"))
FIRST = TOTAL // 10
STREAMS = 16


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def send(endpoint: Endpoint, first: int, last: int) -> None:
    numbers = iter(range(first, last))

    async def one() -> None:
        for number in numbers:
            body = {"prompt": f"request number {number % 5000}", "max_tokens": 2, "stream": bool(number % 2)}
            status, answer = await send_request(endpoint, "POST", "/completions", json.dumps(body).encode())
            assert status == 200, answer

    await asyncio.gather(*(one() for _ in range(STREAMS)))


@pytest.mark.slow
def test_twenty_thousand_requests_leave_memory_flat(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "quire", "serve", str(model), "--random-weights", "--port", "0", "--admin-key",
               "k", "--threads", "1", "--num-pages", "512", "--max-model-len", "256", "--host-memory", "0",
               "--log-level", "error"]  # fmt: skip
    started = start(command, {"OMP_WAIT_POLICY": "passive"})
    try:
        endpoint = parse_url(started.url, "k")
        bare = Endpoint(endpoint.host, endpoint.port, False, "", "k")

        async def soak() -> list[dict[str, Any]]:
            readings = []
            for first, last in ((0, FIRST), (FIRST, TOTAL)):
                await send(endpoint, first, last)
                engine = json.loads((await send_request(bare, "GET", "/admin/engine"))[1])["pid"]
                readings.append({"server": resident(started.process.pid), "engine": resident(engine)})
            return readings

        early, late = asyncio.run(soak())
        for name in early:
            growth = late[name] / early[name] - 1
            print(f"{name}: {early[name] >> 20} MiB after {FIRST}, {late[name] >> 20} MiB after {TOTAL}: {growth:+.2%}")
        for name in early:
            assert late[name] < 1.02 * early[name], name
    finally:
        started.stop()
