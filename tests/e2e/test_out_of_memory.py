"""An engine that outgrows its memory is replaced: the next needs less, as configured, and no stream loses a token."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import KEY, MISSING, Started, need, start

NUM_PAGES, NUM_STREAMS = 200, 4


def serve(folder: Path, out_of_memory: str) -> Started:
    from quire.files.tiny_model import make_tiny_model

    model = make_tiny_model(folder / "model")
    command = [sys.executable, "-m", "quire.chaos.server_process", str(folder / "orders"), "--model", str(model),
               "--random-weights", "--port", "0", "--api-key", KEY, "--admin-key", KEY, "--threads", "1",
               "--num-pages", str(NUM_PAGES), "--max-model-len", "512", "--host-memory", "0", "--engine-memory", "1GiB",
               "--out-of-memory", out_of_memory]  # fmt: skip
    return start(command)


@dataclass
class Answer:
    text: str = ""
    end: str = ""
    num_tokens: int = 0


def stream(client: Any, number: int, begun: threading.Event | None = None) -> Answer:
    body = {"prompt": f"stream {number}", "max_tokens": 400, "temperature": 0.8, "seed": number, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    answer = Answer()
    with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            answer.end = event["error"]["code"] if "error" in event else answer.end
            for choice in event.get("choices", ()):
                answer.text += choice["text"]
                answer.end = choice["finish_reason"] or answer.end
            answer.num_tokens = (event.get("usage") or {}).get("completion_tokens", answer.num_tokens)
            if begun is not None:
                begun.set()
    return answer


@pytest.mark.parametrize("out_of_memory", ["shrink", "precision"])
def test_the_next_engine_needs_less_and_every_stream_goes_on(out_of_memory: str, tmp_path: Path) -> None:
    if MISSING:
        pytest.skip(f"the package {MISSING[0]} is not installed")
    need("torch", "httpx")
    import httpx

    from quire.chaos.faults import arm_fault

    started = serve(tmp_path, out_of_memory)
    try:
        with httpx.Client(base_url=started.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120) as client:
            undisturbed = [stream(client, number) for number in range(NUM_STREAMS)]
            before = client.get("/admin/engine").json()
            results: dict[int, Answer] = {}
            begun = threading.Event()

            def follow(number: int) -> None:
                results[number] = stream(client, number, begun)

            threads = [threading.Thread(target=follow, args=(number,)) for number in range(NUM_STREAMS)]
            for thread in threads:
                thread.start()
            assert begun.wait(60)
            assert arm_fault(tmp_path / "orders", "outgrow") is not None
            for thread in threads:
                thread.join(120)
            state, errors = client.get("/admin/state").json(), client.get("/admin/errors").json()
            after = client.get("/admin/engine").json()
            assert state["restarts"] == 1 and state["resumed_requests"] > 0 and "bytes" in state["cause"]
            assert errors["counts"] == {"engine/out_of_memory": 1}
            assert {(answer.end, answer.num_tokens) for answer in results.values()} == {("length", 400)}
            pages = [one["memory"]["groups"][0]["units"] for one in (before, after)]
            if out_of_memory == "shrink":
                assert [results[number] for number in range(NUM_STREAMS)] == undisturbed, "the same bits"
                assert pages[1] < 0.8 * pages[0] and after["model"]["dtype"] == "float32"
            else:
                assert pages[1] == pages[0] and after["model"]["dtype"] == "float16"
            assert client.post("/admin/check").json()["ok"]
    finally:
        started.stop()
